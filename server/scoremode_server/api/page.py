"""`GET /scoremode`: the page that scores a text and colors its tokens, from the package's folder `page`."""

from hashlib import blake2b
from pathlib import Path

from fastapi import APIRouter, Request, Response

from scoremode_server.api.error_responses import ScoremodeRoute
from scoremode_server.errors import NotServedError
from scoremode_server.settings import serves_page

FOLDER = Path(__file__).parents[1] / "page"

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}

HEADERS = {
    # Only this server's files, and answers of any server that the user types in; no text can become HTML or a script.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self' http: https:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_path(file: Path) -> str:
    """The path that a file of the page is served at."""
    return "/scoremode" if file.name == "index.html" else f"/scoremode/{file.name}"


FILES = {page_path(file): file for file in sorted(FOLDER.iterdir()) if file.suffix in CONTENT_TYPES}
"""By path. Each has its own route, so the server never looks for a client's path on disk."""

router = APIRouter(route_class=ScoremodeRoute, include_in_schema=False)


class PageFile:
    """A file as it was when the server started."""

    def __init__(self, file: Path) -> None:
        self._content = file.read_bytes()
        etag = f'"{blake2b(self._content, digest_size=16).hexdigest()}"'
        self._headers = HEADERS | {"ETag": etag, "Content-Type": CONTENT_TYPES[file.suffix]}

    async def answer(self, request: Request) -> Response:
        """The file, or 304 if the client has it already.

        Raises:
            NotServedError: the server was started with `--no-page`.
        """
        if not serves_page(request.app.state.args):
            raise NotServedError("this server was started with --no-page", None)
        known = request.headers.get("If-None-Match", "")
        if self._headers["ETag"] in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)


for _path, _file in FILES.items():
    router.add_api_route(_path, PageFile(_file).answer, methods=["GET", "HEAD"], name=_file.name)
