"""The errors of reading and converting. Their message is one line: what was found, what was wanted, what to do."""

from __future__ import annotations


class LoraError(ValueError):
    """A file that cannot be read as a LoRA, or not be converted as asked."""


class UnknownKeysError(LoraError):
    """Keys that no known layout has."""


class BrokenModuleError(LoraError):
    """A module of which a part is missing, misshaped, not finite, or there twice."""


class NotALoraError(LoraError):
    """A file of something else: a base model, a text encoder, a LoRA of another model, no safetensors."""


class CannotConvertError(LoraError):
    """What a target layout cannot express, or what asks for the base model. The message says the way out."""
