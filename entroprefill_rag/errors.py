"""The errors a caller can meet. Each message says what was seen, which rule it broke and the way out."""

from __future__ import annotations


class EntroPrefillError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(EntroPrefillError, ValueError):
    """A configuration that cannot work, alone or with the model at hand."""


class RequestError(EntroPrefillError, ValueError):
    """A request that cannot be laid out as a prompt."""


class TemplateError(RequestError):
    """A prompt or chat template that does not put all documents before the query."""


class PromptOverflowError(RequestError):
    """The prompt does not fit the positions of the model."""


class ModelSourceError(EntroPrefillError, ValueError):
    """A model that cannot be found or loaded from the name given."""


class RecordError(EntroPrefillError, ValueError):
    """A record that cannot be read, or that does not have the schema it claims."""


class BackendClosedError(EntroPrefillError, RuntimeError):
    """A backend that was used after ``close()``."""


class LedgerError(EntroPrefillError, RuntimeError):
    """A reuse ledger that cannot be read or written, or a file that is none."""


class DocumentError(EntroPrefillError, ValueError):
    """Documents that cannot be read, or a folder that holds none."""


class AnswerTakenError(EntroPrefillError, RuntimeError):
    """A pending answer that was taken or closed before."""


class ProfileError(ConfigError):
    """A calibrated profile that cannot be read, or that is of another model; or training documents of no use."""


class CertificateError(EntroPrefillError, ValueError):
    """Requests, a grid or a level with which nothing can be certified; or a certificate that cannot be read."""
