"""Names of before, until every test takes them from `fake_server`."""

from fake_server import *  # noqa: F403
from fake_server import FakeServer

KldServer = DocumentServer = FakeServer
