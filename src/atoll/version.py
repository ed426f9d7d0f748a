"""The version, in a file of its own: whatever records it must not import the package's public door."""

from typing import Final

__version__: Final = "0.1.0"
