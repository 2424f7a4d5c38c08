"""Every error a user can meet, in one tree.

::

    ShardwrightError                 exit code 2 unless said otherwise
    ├── ConfigError                  a run file, a flag or a value in one
    │   ├── LayoutError              degrees that do not fit the world, the model or each other
    │   └── ModelConfigError         shapes that no model can have
    ├── DataError                    text, datasets, tokenizers
    ├── CheckpointError              missing, torn or foreign checkpoints
    ├── NonFiniteError               exit code 1: the gradient norm is not finite; every rank stops after the same step
    ├── PlacementError               exit code 3: ranks hold different values of what they must hold alike (--check)
    └── RankError                    exit code 3: a rank failed; names the rank and the cause

A message says what was given, what is needed and what to try. The command line prints it without a
traceback and exits with ``exit_code``. ``assert`` is for our own invariants only.
"""

from __future__ import annotations


class ShardwrightError(Exception):
    """Base of all errors that a user can cause or must be told about."""

    exit_code: int = 2


class ConfigError(ShardwrightError):
    """A configuration value is unknown, out of range or contradicts another."""


class LayoutError(ConfigError):
    """A layout's degrees do not fit the world size, the model or each other."""


class ModelConfigError(ConfigError):
    """A model's shapes are impossible or not supported."""


class DataError(ShardwrightError):
    """Text, a dataset or a tokenizer is missing, empty, torn or of the wrong kind."""


class CheckpointError(ShardwrightError):
    """A checkpoint is missing, incomplete, corrupt or does not match the model."""


class NonFiniteError(ShardwrightError):
    """The gradient norm is not finite; every rank sees the same norm and stops after the same step."""

    exit_code = 1


class PlacementError(ShardwrightError):
    """Ranks hold different values of what they must hold alike, or not all of it between them; every rank sees it."""

    exit_code = 3


class RankError(ShardwrightError):
    """One rank failed, so all ranks were ended. ``rank`` is the first that failed (-1: unknown)."""

    exit_code = 3

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
