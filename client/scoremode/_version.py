"""The installed version; a module of its own because the package and the modules that it imports both need it."""

from importlib.metadata import version

__version__ = version("scoremode")
