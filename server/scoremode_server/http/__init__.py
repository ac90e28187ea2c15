"""HTTP for all routes: API keys and request ids, bodies, errors and their statuses, responses, the page."""
