"""A name that a server does not have: the answer lists those that it has."""

from tests.unit.server.api.light_app import client_of, error_of, light_app


async def test_an_unknown_model_is_answered_with_the_served_ones_and_adapters():
    app = light_app()
    app.state.scoremode.models.models.lora_requests = {"an-adapter": None}
    async with client_of(app) as client:
        response = await client.post("/v1/score", json={"model": "foo", "prompt": [5, 6]})
    message = "The model `foo` does not exist. Valid aliases: m. Adapters: an-adapter."
    assert error_of(response) == (404, "model", message)
