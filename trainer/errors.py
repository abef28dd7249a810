"""The errors that a user can mend. Their message is one line: what was found, what was wanted, what to do."""

from __future__ import annotations


class GraftError(Exception):
    """Any error whose message alone tells the user what to do; user interfaces print it without a traceback."""


class SettingsError(GraftError):
    """A setting that cannot be used."""


class DatasetError(GraftError):
    """Pictures, captions or encoded samples that cannot be trained on."""


class CheckpointError(GraftError):
    """A model file that cannot be read as a base."""


class NotAModelFileError(CheckpointError):
    """No such file, or a file that is not safetensors."""


class PickleFileError(CheckpointError):
    """A pickled checkpoint, which could run code on loading."""


class TruncatedFileError(CheckpointError):
    """A file shorter than its header says."""


class WrongModelError(CheckpointError):
    """A sound file of something else: another model, a text encoder, a VAE, a LoRA."""


class MissingKeysError(CheckpointError):
    """Parameters that the family needs and the file lacks."""


class UnexpectedKeysError(CheckpointError):
    """Parameters that the family does not know."""


class MisshapedKeysError(CheckpointError):
    """Parameters of another shape than the family's."""


class UnreadableFormatError(CheckpointError):
    """A quantisation that cannot be read, or one whose scales are not there."""


class DoesNotFitError(SettingsError):
    """More memory than there is."""


class TrainingError(GraftError):
    """A run that cannot go on or whose result is not sound."""


class StoppedError(TrainingError):
    """The user's stop, noticed in the middle of a preview, which is left out: the run saves what there is and ends."""


def some(names: list[str], most: int = 3) -> str:
    """The first few names and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def first_line(error: BaseException) -> str:
    """What an error of another library says, as far as it fits into a message of one line."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__
