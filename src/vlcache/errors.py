"""The errors that a caller can meet.

    VLCacheError
    ├── ConfigError             an unknown option, policy or value
    ├── InputError              a prompt that cannot be prefilled
    ├── MediaError              a picture that cannot be read or used
    └── UnsupportedModelError   a model whose attention rules reuse out

A caller's mistake raises: the message says what is wrong, which item, and what to do. A fault of a store,
an entry or a tier never raises: it ends as a counted miss and a right answer.
"""

__all__ = ["ConfigError", "InputError", "MediaError", "UnsupportedModelError", "VLCacheError"]


class VLCacheError(Exception):
    """Base of everything that vlcache raises on purpose."""


class ConfigError(VLCacheError):
    """An option, a policy or a value that vlcache does not know."""


class InputError(VLCacheError):
    """A prompt that cannot be prefilled as given."""


class MediaError(VLCacheError):
    """A picture that cannot be read, decoded or used.

    Attributes
    ----------
    item : str
        The picture, as the caller would recognise it ("picture 2 (page.png)").
    """

    def __init__(self, item: str, problem: str, remedy: str) -> None:
        super().__init__(f"{item}: {problem}; {remedy}")
        self.item = item


class UnsupportedModelError(VLCacheError):
    """A model whose attention makes picture reuse wrong, or that has not been tested."""
