"""`/v1/turns` next to transformers: chat templates of many families, their marks, and what is refused."""

import json
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams

from tests.models import MARKED_TEMPLATE
from tests.unit.server.light_app import app_with_completions, client_of, error_of
from tests.unit.server.scoring.chat_templates import TEMPLATES, Served, described

COUNT = {"role": "user", "content": "How many are there?"}
ELEVEN = {"role": "assistant", "content": "Eleven, and a bit."}
COLOUR = {"role": "user", "content": "And what colour is grass? "}
GREEN = {"role": "assistant", "content": "It is green."}
WEATHER = {"name": "weather", "description": "Now.", "parameters": {"type": "object", "properties": {"city": {}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
}
THINKING = [
    COUNT,
    ELEVEN | {"reasoning_content": "Ten and one."},
    COLOUR,
    GREEN | {"content": "<think>\nGrass, then.\n</think>\n\nIt is green."},
]
CONVERSATIONS = {
    "plain": [{"role": "system", "content": "Be brief."}, COUNT, ELEVEN, COLOUR, GREEN],
    "without_system": [COUNT, ELEVEN, COLOUR, GREEN],
    "tools": [COUNT, CALLING, {"role": "tool", "tool_call_id": "a", "content": "Sunny."}, GREEN],
    "thinking": THINKING,
}
PLAIN = CONVERSATIONS["plain"]


def rendered(model: Path, messages: list[dict[str, Any]], **options: Any) -> Any:
    """Render a conversation with transformers, which wants the arguments of calls as objects."""
    messages = deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return as_by_transformers(model, messages, **options)


def as_by_transformers(model: Path, messages: list[dict[str, Any]], **options: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)


async def turns_of(model: Path, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client_of(app_with_completions(model)) as client:
        answer = await client.post("/v1/turns", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def texts_of(model: Path, sequence: dict[str, Any]) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer.decode(sequence["token_ids"][turn["first"] : turn["end"]]) for turn in sequence["turns"]]


@pytest.mark.parametrize("family", TEMPLATES)
async def test_turns_are_what_the_model_generates(served: Served, family: str):
    template = TEMPLATES[family]
    about, model = described(template), served(template)
    messages = CONVERSATIONS[about.get("conversation", "plain")]
    tools = {"tools": TOOLS} if messages is CONVERSATIONS["tools"] else {}
    *own, whole = await turns_of(model, {"messages": messages} | tools)
    assert whole["token_ids"] == rendered(model, messages, **tools)["input_ids"]
    assert len(own) == about.get("own", 0)
    for sequence, place in zip(own, (1, 3), strict=False):
        # Text that the template adds after the turn's last token is not generated.
        until = rendered(model, messages[: place + 1], **tools)["input_ids"]
        assert sequence["token_ids"] == until[: sequence["turns"][0]["end"]]
    assert [text for sequence in (*own, whole) for text in texts_of(model, sequence)] == about["turns"]


CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<{{ message.role }} {{ message.name }}>"
    "{% if 'content' not in message %}absent{% elif message.content is none %}null"
    "{% else %}{{ message.content }}{% endif %}"
    "{% for each in message.tool_calls or [] %}{{ each.id }}{{ each.type }}"
    "{% set call = each.function %}CALL{% endfor %}"
    "{{ message.tool_call_id }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
RENDERED_CALLS = {
    "tojson": "{{ {'name': call.name, 'arguments': call.arguments} | tojson }}",
    "items": "{{ call.name }}{% for key, value in call.arguments.items() %}{{ key }}={{ value | tojson }}{% endfor %}",
    "text": "{{ call.name }}({{ call.arguments }})",
    "either": "{{ call.arguments if call.arguments is string else call.arguments | tojson }}",
    "added": "{{ call.name + call.arguments }}",
}
"""Templates' texts of a call."""
ARGUMENTS = {"city": "Köln", "days": [1, 2.50], "unit": None, "more": {"b": True, "a": "\\"}}


def calling(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    """A conversation with a call of a tool, as transformers documents it."""
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "name": "weather", "content": "Sunny."}
    return [COUNT, {"role": "assistant", "tool_calls": [call, call], **fields}, result, GREEN]


@pytest.mark.parametrize(
    "written", ["tojson", "items", "text", "either", *(name for name in TEMPLATES if "tools" in name)]
)
async def test_calls_are_rendered_as_by_transformers(served: Served, written: str):
    """Arguments that are objects, without an id, also as a prompt, and tools without the fields that vLLM adds."""
    model = served(TEMPLATES.get(written) or CALLS.replace("CALL", RENDERED_CALLS[written]))
    with_id = {"id": "abcdefghi", "index": 0, "function": {"name": "weather", "arguments": {}}}
    no_parameters = {"function": WEATHER | {"return": {"type": "string"}}, "type": "function"}
    tools = [no_parameters, {"type": "function", "function": {"name": "f"}}]
    contents = ({}, {"content": None}, {"content": ""}, {"content": "So: "}, {"tool_calls": [with_id]})
    async with client_of(app_with_completions(model)) as client:
        for fields, (end, is_prompt) in product(contents, ((4, False), (3, True))):
            messages, options = calling(ARGUMENTS, **fields)[:end], {"add_generation_prompt": is_prompt}
            answer = await client.post("/v1/turns", json={"messages": messages, "tools": tools, **options})
            sequence = answer.json()["data"][-1]
            expected = as_by_transformers(model, deepcopy(messages), tools=tools, **options)["input_ids"]
            assert (sequence["token_ids"], sequence["turns"] == []) == (expected, is_prompt)


@pytest.mark.parametrize(
    ("written", "arguments", "as_rendered"),
    [
        # An object in JSON is one, as in vLLM, unless the template can only add a text.
        *(("tojson", json.dumps(ARGUMENTS), ARGUMENTS), ("items", '{"a":1}', {"a": 1}), ("tojson", "", {})),
        *(("added", json.dumps(ARGUMENTS), json.dumps(ARGUMENTS)), ("either", '{"a":1}', {"a": 1})),
        # Other texts are as they are given, in place of which vLLM has {}.
        *(("either", text, text) for text in ("{city", "[1]", '{"a": "\\ud800"}')),
        pytest.param("either", "[" * 990, "[" * 990, id="nested too deep for Python's parser"),
        ("tojson", None, None),
    ],
)
async def test_arguments_in_json_become_objects(served: Served, written: str, arguments: Any, as_rendered: Any):
    model = served(CALLS.replace("CALL", RENDERED_CALLS[written]))
    *_, sequence = await turns_of(model, {"messages": calling(arguments)})
    assert sequence["token_ids"] == as_by_transformers(model, calling(as_rendered))["input_ids"]


async def test_marked_turns_are_transformers_assistant_tokens(served: Served):
    model = served(TEMPLATES["smollm3"])
    expected = rendered(model, PLAIN, return_assistant_tokens_mask=True)
    # A request's arguments for the template do not change how marks are found.
    arguments = {"return_assistant_tokens_mask": False, "return_dict": False}
    (sequence,) = await turns_of(model, {"messages": PLAIN, "chat_template_kwargs": arguments})
    inside = [any(turn["first"] <= at < turn["end"] for turn in sequence["turns"]) for at in range(len(expected[0]))]
    assert sequence["token_ids"] == expected["input_ids"]
    assert inside == [bool(mark) for mark in expected["assistant_masks"]]
    assert sum(inside) > 10


async def test_other_roles_are_turns_without_the_prompt_for_the_next(served: Served):
    """A user's turn has the header that its template gives it, and a message that adds nothing is none."""
    model = served(TEMPLATES["chatml"])
    (sequence,) = await turns_of(model, {"messages": PLAIN, "roles": ["system", "user"]})
    assert [turn["role"] for turn in sequence["turns"]] == ["system", "user", "user"]
    # The first token of a sequence has no context.
    assert texts_of(model, sequence) == [
        "system\nBe brief.<|im_end|>\n",
        "<|im_start|>user\nHow many are there?<|im_end|>\n",
        "<|im_start|>user\nAnd what colour is grass? <|im_end|>\n",
    ]


async def test_conversations_have_tools_of_their_own_or_all_the_same(served: Served):
    model = served(TEMPLATES["hermes_tools"])
    other = [{"type": "function", "function": WEATHER | {"name": "forecast"}}]
    conversation = CONVERSATIONS["tools"]
    for tools, of_each in ((TOOLS, (TOOLS, TOOLS)), ([None, other], (None, other))):
        found = await turns_of(model, {"messages": [conversation, conversation], "tools": tools})
        assert [each["conversation"] for each in found] == [0, 1]
        assert [each["token_ids"] for each in found] == [
            rendered(model, conversation, tools=own)["input_ids"] for own in of_each
        ]


async def test_turns_that_are_sequences_of_their_own_are_scored_alike_by_all_routes(served: Served):
    """The template keeps the last message's thoughts only. A conversation with calls of tools is one sequence."""
    calls = "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    loop = "{% for message in messages %}{{ message.role }}: THOUGHTS{{ message.content }}CALLS\n{% endfor %}"
    thoughts = "{% if loop.last and message.reasoning_content %}{{ message.reasoning_content }} {% endif %}"
    thinking = [*THINKING[:3], ELEVEN | {"reasoning_content": "Two more."}]
    body = {"messages": [[COUNT, ELEVEN], thinking, calling(ARGUMENTS)]}
    model = served(loop.replace("THOUGHTS", thoughts).replace("CALLS", calls))
    async with client_of(app_with_completions(model)) as client:
        turns, score, perplexity = [
            (await client.post(f"/v1/{route}", json=body)).json() for route in ("turns", "score", "perplexity")
        ]
    sequences = turns["data"]
    assert [sequence["conversation"] for sequence in sequences] == [0, 1, 1, 2]
    lengths = [turn["end"] - turn["first"] for sequence in sequences for turn in sequence["turns"]]
    places = [(each["prompt_index"], each["continuation_index"]) for each in score["data"]]
    assert places == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [each["num_scored"] for each in score["data"]] == lengths
    assert perplexity["num_scored"] == sum(lengths)
    assert perplexity["nll_sum"] == pytest.approx(-sum(each["sum_logprob"] for each in score["data"]))


@pytest.mark.parametrize(
    ("generation_config", "ends"),
    [({"eos_token_id": 5}, [1, 5]), ({"eos_token_id": [9, 5, 1]}, [1, 5, 9]), ({}, [1]), (None, [1, 8])],
)
def test_an_answer_ends_where_vllm_ends_it(served: Served, generation_config: dict[str, Any] | None, ends: list[int]):
    """The EOS comes from generation_config.json, else from config.json, else from the tokenizer."""
    model = served(TEMPLATES["chatml"])
    (model / "generation_config.json").unlink()
    (model / "config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()) | {"eos_token_id": 8})
    )
    if generation_config is not None:
        (model / "generation_config.json").write_text(json.dumps(generation_config))
    conversations, params = app_with_completions(model).state.scoremode.conversations, SamplingParams()
    params.update_from_generation_config(conversations.model.try_get_generation_config(), 1)
    assert conversations.ends == sorted(params.all_stop_token_ids) == ends


def test_chats_are_rendered_alike_if_the_templates_and_what_they_read_are_equal(served: Served):
    models = [served(TEMPLATES[name]) for name in ("chatml", "chatml", "zephyr", "chatml")]
    (models[3] / "chat_template.jinja").unlink()
    same, again, other, without = (app_with_completions(model).state.scoremode.conversations for model in models)
    assert same.templates() == again.templates() != other.templates()
    assert without.templates() is None
    for owner, name, value in (
        (again.online, "chat_template", "{{ messages }}"),
        (again.online, "default_chat_template_kwargs", {"thinking": False}),
        (again.tokenizer, "bos_token", "<|im_start|>"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            assert same.templates() != again.templates()
    again.online.use_harmony = True
    assert again.templates() is None


SAYS_OK = [
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "ok"},
]
PARTS = "{% generation %}<think>{{ message['reasoning'] }}</think>{% endgeneration %}"
MARKED = MARKED_TEMPLATE.replace("%}{% generation %}", "%}PARTS{% generation %}")
ALL_MARKED = "{% for message in messages %}{% generation %}{{ message['content'] }}{% endgeneration %}{% endfor %}"
REWRITES = "{{ messages[-1]['content'] }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("family", "body", "message"),
    [
        ("chatml", {"messages": [PLAIN, []]}, "messages[1] is empty: there is no message to score"),
        ("chatml", {"messages": "Hello"}, "messages: must be a list of messages, which are obj"),
        *(
            (
                "chatml",
                {"messages": [COUNT | {"content": ["A text", part]}, ELEVEN]},
                f"messages[0][0] has a part of type '{part_type}' that is not a text, content[1]",
            )
            for part, part_type in (
                ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image_url"),
                ({"type": "text", "text": "a", "image_url": "b"}, "text"),
                *((None, None), (1, None), ([None], None), ({"text": "a"}, None), ({"type": "video"}, "video")),
            )
        ),
        ("chatml", {"messages": [{"content": "Hello"}]}, "messages[0][0] must have a role"),
        *(
            ("chatml", {"messages": [COUNT, ELEVEN | {"tool_calls": calls}]}, f"messages[0][1].tool_calls{message}")
            for calls, message in (
                ({}, " must be a list"),
                *(([call], "[0] must be a call of a function, such as") for call in ("f", {"function": "f"}, WEATHER)),
                ([{"function": {"arguments": {}}}], "[0] must be a call of a function, such as"),
            )
        ),
        *(
            (
                "chatml",
                {"messages": [COUNT, message, ELEVEN]},
                f"messages[0][1].{field}: Input should be a valid string",
            )
            for message, field in (
                (COUNT | {"content": None}, "content"),
                ({"role": "tool", "content": {"a": 1}}, "content"),
                ({"role": "tool", "content": "a", "tool_call_id": 5}, "tool_call_id"),
            )
        ),
        (
            "added",
            {"messages": calling(ARGUMENTS)},
            'messages[0]: its first 4 messages cannot be rendered: can only concatenate str (not "dict") to str',
        ),
        ("items", {"messages": calling("[1]")}, "messages[0]: its first 4 messages cannot be rendered: 'str object'"),
        ("chatml", {"messages": PLAIN, "roles": ["tool"]}, "messages has no turn of tool to score"),
        # It is the first message.
        ("chatml", {"messages": [ELEVEN]}, "messages has no turn of assistant to score"),
        ("chatml", {"messages": PLAIN, "tools": [TOOLS] * 3}, "tools has lists for 3 conversations"),
        ("chatml", {"messages": PLAIN, "tools": {}}, "tools: must be a list of objects, or one such list"),
        (
            "chatml",
            {"messages": PLAIN, "chat_template_kwargs": {"chat_template": "{{ messages }}"}},
            "Chat template is passed with request, but",
        ),
        ("mistral", {"messages": [COUNT, COUNT]}, "messages[0]: its first 2 messages cannot be rendered: Roles must"),
        (
            "deepseek_r1",
            {"messages": THINKING},
            "messages[0][1] cannot be scored: the chat template drops",
        ),
        ("all_marked", {"messages": PLAIN}, "messages[0] cannot be scored: the chat template marks 'Be brief.' as"),
        ("rewrites", {"messages": PLAIN}, "messages[0][2] cannot be scored: the chat template changes messages before"),
    ],
)
async def test_what_cannot_be_scored_is_refused(served: Served, family: str, body: dict[str, Any], message: str):
    own = {name: CALLS.replace("CALL", call) for name, call in RENDERED_CALLS.items()}
    model = served((TEMPLATES | own | {"rewrites": REWRITES, "all_marked": ALL_MARKED})[family])
    async with client_of(app_with_completions(model)) as client:
        status, _, found = error_of(await client.post("/v1/turns", json=body))
    assert (status, found[: len(message)]) == (400, message)


@pytest.mark.parametrize(
    ("messages", "template", "texts"),
    [
        # The first span ends within the first token, for which transformers marks all others.
        (SAYS_OK, MARKED_TEMPLATE, ["ok</s>"]),
        # Spans that touch are two turns if they are of two messages, and one if they are of one.
        ([COUNT, ELEVEN, GREEN], MARKED_TEMPLATE, ["Eleven, and a bit.</s>", "It is green.</s>"]),
        ([COUNT, GREEN | {"reasoning": "So."}], MARKED.replace("PARTS", PARTS), ["<think>So.</think>It is green.</s>"]),
    ],
    ids=["the first token", "two messages", "parts of a message"],
)
async def test_each_marked_message_is_a_turn(
    served: Served, llama_2_model: Path, messages, template: str, texts: list[str]
):
    model = served(template, llama_2_model)
    (sequence,) = await turns_of(model, {"messages": messages})
    assert sequence["token_ids"] == rendered(model, messages)["input_ids"]
    assert texts_of(model, sequence) == texts


async def test_a_trusted_template_of_a_request_is_the_one_that_renders(served: Served):
    """It replaces the model's and the server's, and its marks are found."""
    model = served(TEMPLATES["chatml"])
    app = app_with_completions(model)
    online = app.state.scoremode.conversations.online
    online.trust_request_chat_template, online.chat_template = True, TEMPLATES["smollm3"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    async with client_of(app) as client:
        for template in (MARKED_TEMPLATE, "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"):
            body = {"messages": [COUNT, ELEVEN], "chat_template_kwargs": {"chat_template": template}}
            (sequence,) = (await client.post("/v1/turns", json=body)).json()["data"]
            expected = tokenizer.apply_chat_template([COUNT, ELEVEN], chat_template=template, tokenize=True)
            assert sequence["token_ids"] == expected["input_ids"]
            assert texts_of(model, sequence)[0].strip() == (
                "Eleven, and a bit.</s>" if "gener" in template else "Eleven, and a bit."
            )
        body["chat_template_kwargs"] = {"chat_template": 5}
        assert error_of(await client.post("/v1/turns", json=body))[:2] == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    "body",
    [
        "{{ message['content'] }}",
        "{% if loop.last %}{% generation %}{{ message['content'] }}{% endgeneration %}{% endif %}",
    ],
)
@pytest.mark.parametrize(
    ("header", "content", "is_merged"), [(": ", "Hello", True), (":", " Hello", False), ("\n", "\n\nHello", True)]
)
async def test_a_first_token_that_began_in_the_prompt_is_told(served: Served, body, header, content, is_merged):
    """Its tokenizer joins a space with the word after it, and line breaks."""
    prompt = f"{{% if add_generation_prompt %}}assistant{header}{{% endif %}}"
    model = served(f"{{% for message in messages %}}{{{{ message['role'] }}}}{header}{body}</s>{{% endfor %}}{prompt}")
    (sequence,) = await turns_of(model, {"messages": [COUNT, ELEVEN | {"content": content}]})
    turn = sequence["turns"][-1]
    begins = AutoTokenizer.from_pretrained(model).decode(sequence["token_ids"][turn["first"] :])
    assert (turn["is_merged"], begins.startswith(content)) == (is_merged, not is_merged)
