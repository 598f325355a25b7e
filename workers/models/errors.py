"""What can go wrong with a model before it serves; each message is a sentence for a user.

ModelError
|-- ModelNotFoundError    no such model here: unknown name, not pulled yet, no such directory
|-- ModelAccessError      it exists but could not be fetched: offline, gated, no room, pip failed
|-- ModelIntegrityError   what was fetched is not what was pinned
`-- ModelFormatError      it is there, but not in a form that Baton loads
"""

from __future__ import annotations


class ModelError(Exception):
    """A model could not be found, fetched, checked, converted or loaded."""


class ModelNotFoundError(ModelError):
    """There is no such model: an unknown name, one not pulled yet, or a missing directory."""


class ModelAccessError(ModelError):
    """The model exists elsewhere but could not be fetched."""


class ModelIntegrityError(ModelError):
    """The bytes differ from the pinned ones; nothing of them was kept."""


class ModelFormatError(ModelError):
    """The model is not in a form that Baton loads."""
