"""Conversations of a dataset, the windows of their turns, and the classes of their tokens."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from fake_server import FakeServer, changed, client_of, error, ok

from scoremode import CorpusError, record_reference
from scoremode.runs import load_corpus
from scoremode.runs.conversations import token_classes
from scoremode.runs.plan import make_plan
from scoremode.windows import TOKEN_CLASSES

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


TURN = {"role": "assistant", "first": 1, "end": 3, "is_merged": False}
SEQUENCE = {"conversation": 0, "token_ids": [1, 2, 3], "turns": [TURN]}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "messages", [MESSAGES, SHAREGPT, json.dumps(MESSAGES), [{**MESSAGES[0], "name": None}, MESSAGES[1]]]
)
def test_conversations_of_each_shape_are_the_same(tmp_path, messages):
    path = written(
        tmp_path / "chats.jsonl", [{"chat": messages, "lang": "de"}, {"chat": messages, "lang": "en", "tools": TOOLS}]
    )
    corpus = load_corpus(path, messages="chat", by="lang", chat_template_kwargs={"thinking": True})
    assert [each.messages for each in corpus.conversations] == [MESSAGES, MESSAGES]
    assert corpus.labels == ("de", "en")
    assert corpus.prompt == {
        "messages": [MESSAGES, MESSAGES],
        "tools": [None, TOOLS],
        "chat_template_kwargs": {"thinking": True},
    }
    assert corpus.fingerprint != load_corpus(path, messages="chat").fingerprint


# Meanings of the tags in LLaMA-Factory's, FastChat's, Unsloth's and ms-swift's sets, and of axolotl's `roles`.
NAMES = {
    "system": ["system", "System"],
    "user": ["human", "user", "input", "prompter"],
    "assistant": [
        "gpt",
        "assistant",
        "chatgpt",
        "bing",
        "bard",
        "bot",
        "model",
        "output",
        "function_call",
        "tool_call",
    ],
    "tool": ["observation", "tool", "function", "function_response", "function-response", "tool_response", "ipython"],
}


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, names in NAMES.items() for name in names])
@pytest.mark.parametrize(("role_key", "text_key"), [("from", "value"), ("role", "content")])
def test_roles_have_the_names_of_other_tools(tmp_path, role, name, role_key, text_key):
    chat = [*SHAREGPT, {role_key: name, text_key: '{"name": "f"}'}]
    corpus = load_corpus(written(tmp_path / "chats.jsonl", [{"chat": chat}]), messages="chat")
    assert corpus.conversations[0].messages == [*MESSAGES, {"role": role, "content": '{"name": "f"}'}]


def test_a_row_has_its_system_message_and_its_tools_next_to_the_messages(tmp_path):
    function = {"name": "f", "description": "", "parameters": {"default": None}}
    row = {"chat": SHAREGPT, "system": "Be brief.", "tools": json.dumps([function])}
    own = [{"from": "system", "value": "Be kind."}, *SHAREGPT]
    path = written(tmp_path / "chats.jsonl", [row, {**row, "chat": own, "tools": function}, {"chat": own}])
    found = load_corpus(path, messages="chat").conversations
    texts = [[message["content"] for message in each.messages] for each in found]
    assert texts == [["Be brief.", "Hi", "Hello"], *[["Be kind.", "Hi", "Hello"]] * 2]
    assert [each.tools for each in found] == [*[[{"type": "function", "function": function}]] * 2, None]


def test_fields_that_only_other_rows_of_a_table_have_are_left_out(tmp_path):
    tools = [[{**TOOLS[0], "function": {"name": "f", "parameters": {name: {"type": "string"}}}}] for name in "ab"]
    table = pyarrow.Table.from_pylist([{"chat": MESSAGES, "tools": each} for each in tools])
    pyarrow.parquet.write_table(table, tmp_path / "chats.parquet")
    found = load_corpus(str(tmp_path / "chats.parquet"), messages="chat").conversations
    assert [each.tools for each in found] == tools


@pytest.mark.parametrize(
    ("row", "message"),
    [
        *[
            ({"chat": chat}, "not a list of messages")
            for chat in ("Hi", [1], [{"content": "Hi"}], {"role": "user"}, None)
        ],
        ({"chat": MESSAGES, "tools": "none"}, "other tools than a list of functions"),
        ({"chat": [*SHAREGPT, {"from": "narrator", "value": "x"}]}, "message 3 is of role 'narrator', .*chatgpt"),
        ({"chat": [*SHAREGPT, {"from": "gpt", "value": None}]}, "message 3 has no text: its content is null"),
        ({"chat": [*SHAREGPT, {"from": "gpt", "value": 5}]}, "message 3 has no text: its content is 5"),
        ({"chat": [MESSAGES[0], {"role": "assistant", "content": "\ud800"}]}, "is not valid Unicode at character"),
        ({"chat": []}, "has no answer of the assistant"),
        ({"chat": [SHAREGPT[0]]}, "has no answer of the assistant"),
        ({"chat": [{"from": "human", "value": "<image> Who?"}, SHAREGPT[1]], "image": "a.png"}, "has <image> in its"),
        ({"chat": MESSAGES, "system": 5}, "column 'system' is not text but int"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(tmp_path, row, message):
    path = written(tmp_path / "chats.jsonl", [{"chat": MESSAGES}, row])
    with pytest.raises(CorpusError, match=f"row 2 of .*chats.jsonl.*{message}"):
        load_corpus(path, messages="chat")


def test_a_column_of_images_that_is_null_in_every_row_marks_no_text(tmp_path):
    chat = [{"role": "user", "content": "Is <image> a tag?"}, MESSAGES[1]]
    images = pyarrow.array([None], pyarrow.list_(pyarrow.binary()))
    table = pyarrow.table({"chat": [json.dumps(chat)], "images": images})
    pyarrow.parquet.write_table(table, path := tmp_path / "chats.parquet")
    assert len(load_corpus(str(path), messages="chat").conversations) == 1


async def test_a_row_that_the_server_refuses_is_named(tmp_path):
    corpus = load_corpus(written(tmp_path / "chats.jsonl", [{"chat": MESSAGES}] * 70), messages="chat")
    server, rows_before = FakeServer(), {70: 0, 6: 64}

    def handler(request):
        if request.url.path not in ("/v1/turns", "/v1/references"):
            return server(request)
        # The second request to render has the last six.
        at = 65 - rows_before.get(len(json.loads(request.content)["messages"]), 65)
        if at:
            return error(400, f"messages[{at}][1].tool_calls must be a list")
        return ok({"object": "turns", "data": [SEQUENCE]})

    async with client_of(handler) as client:
        for work in (make_plan(client, await client.info(), corpus), record_reference(client, corpus, "chats")):
            with pytest.raises(CorpusError, match=r"row 66 of .*chats.jsonl, message 2.tool_calls must be a list"):
                await work


def test_a_call_without_content_is_not_one_with_null(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}
    path = written(
        tmp_path / "chats.jsonl", [{"chat": [MESSAGES[0], each]} for each in (call, call | {"content": None})]
    )
    found = [each.messages[1] for each in load_corpus(path, messages="chat").conversations]
    assert found == [call, call | {"content": None}]


def test_fields_without_use_are_a_warning(tmp_path, caplog):
    chat = [{"from": "human", "value": "Is <image> a tag?", "weight": 0}, {**SHAREGPT[1], "train": False}]
    load_corpus(written(tmp_path / "chats.jsonl", [{"chat": chat}]), messages="chat")
    assert caplog.messages[0].endswith("are not used, and every turn of the assistant is scored: train, weight")


async def test_rows_that_have_nothing_to_score_are_a_warning(tmp_path, caplog):
    texts = written(tmp_path / "texts.jsonl", [{"text": text, "kind": "a"} for text in ("one two", "", "three")])
    chats = written(tmp_path / "chats.jsonl", [{"chat": MESSAGES}] * 3)
    server = FakeServer()

    def handler(request):
        # The template renders nothing of the second, and the third's turn begins within a token.
        data = [SEQUENCE, {**SEQUENCE, "turns": [TURN | {"is_merged": True}], "conversation": 2}]
        return ok({"object": "turns", "data": data}) if request.url.path == "/v1/turns" else server(request)

    async with client_of(handler) as client:
        for corpus in (load_corpus(texts, by="kind"), load_corpus(chats, messages="chat")):
            await make_plan(client, await client.info(), corpus)
    kept = changed(server, "/v1/references/texts/windows", lambda answer: answer.update(documents=[0, 2]))
    async with client_of(kept) as client:
        await record_reference(client, load_corpus(texts, by="kind"), "texts", method="disjoint", context_length=4)
    unscored, merged = ("1 of 3 rows", "left out: 2"), ("1 of 3 rows", "scored whole: 3")
    assert [(each[:11], each[-len(unscored[1]) :]) for each in caplog.messages if "whole" not in each] == [unscored] * 3
    assert [(each[:11], each[-len(merged[1]) :]) for each in caplog.messages if "whole" in each] == [merged]


def test_rows_with_a_label_are_documents_and_no_group_is_called_none(tmp_path):
    labels = {"a": "code", "b": None, "c": "", "d": 0, "e": False}
    path = written(tmp_path / "texts.jsonl", [{"text": text, "kind": label} for text, label in labels.items()])
    corpus = load_corpus(path, by="kind")
    assert corpus.documents == tuple(labels)
    assert corpus.labels == ("code", "(no label)", "(no label)", "0", "False")
    with pytest.raises(CorpusError, match="no column 'language'"):
        load_corpus(path, by="language")


TURNS = {
    "Yes.": "text",
    "<think>|Hm|</think>|Yes.": "reasoning reasoning reasoning text",
    # The generation prompt has the opening tag, and a tag may be of several tokens.
    "Hm|</|think|>|Yes.": "reasoning reasoning reasoning reasoning text",
    "<think>|never| closed": "reasoning reasoning reasoning",
    "I call|<tool_call>|{}|</tool_call>|.": "text,tool call,tool call,tool call,text",
    "[TOOL_CALLS]|[{}]": "tool call,tool call",
}


@pytest.mark.parametrize(("turn", "wanted"), TURNS.items())
def test_tokens_have_the_class_of_the_tags_around_them(turn, wanted):
    texts = turn.split("|")
    found = token_classes(np.arange(len(texts)), [len(texts)], ["assistant"], dict(enumerate(texts)))
    assert [TOKEN_CLASSES[index] for index in found] == wanted.split("," if "," in wanted or " call" in wanted else " ")
