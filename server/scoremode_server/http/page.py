"""`GET /scoremode`: the page that scores a text and colors its tokens, from the package's folder `page`."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Request, Response

from scoremode_server.errors import NotServedError
from scoremode_server.http.requests import ScoremodeRoute

FOLDER = Path(__file__).parents[1] / "page"

CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

HEADERS = {
    # The page can load only this server's files, and request scores from any server that the user types in. No text can
    # become HTML or a script.
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

FILES = {
    "/scoremode" if file.name == "index.html" else f"/scoremode/{file.name}": file
    for file in sorted(FOLDER.iterdir())
    if file.suffix in CONTENT_TYPES
}
"""Files by path. Each has its own route, so the server never looks for a client's path on disk."""

router = APIRouter(route_class=ScoremodeRoute, include_in_schema=False)


def _answering_with(file: Path) -> Callable[[Request], Awaitable[Response]]:
    """Make an endpoint that answers with a file as it was when the server started."""
    content = file.read_bytes()
    headers = HEADERS | {"Content-Type": f"{CONTENT_TYPES[file.suffix]}; charset=utf-8"}

    async def answer(request: Request) -> Response:
        if getattr(request.app.state.args, "no_page", False):
            raise NotServedError("this server was started with --no-page", None)
        return Response(content, headers=headers)

    return answer


for _path, _file in FILES.items():
    router.add_api_route(_path, _answering_with(_file), methods=["GET", "HEAD"], name=_file.name)
