"""Conversations of a dataset, the windows of their turns, and the classes of their tokens."""

import json

import numpy as np
import pytest

from scoremode.errors import CorpusError
from scoremode.runs.conversations import token_classes
from scoremode.runs.corpora import load_corpus
from scoremode.windows import TOKEN_CLASSES

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


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


@pytest.mark.parametrize("chat", ["Hi", [1], [{"content": "Hi"}], {"role": "user"}, None])
def test_a_row_that_is_no_conversation_is_named(tmp_path, chat):
    path = written(tmp_path / "chats.jsonl", [{"chat": MESSAGES}, {"chat": chat}])
    with pytest.raises(CorpusError, match=r"row 2 of .* is not a list of messages"):
        load_corpus(path, messages="chat")


def test_rows_with_a_label_are_documents(tmp_path):
    path = written(tmp_path / "texts.jsonl", [{"text": "a", "kind": "code"}, {"text": "b", "kind": "prose"}])
    corpus = load_corpus(path, by="kind")
    assert (corpus.documents, corpus.labels) == (("a", "b"), ("code", "prose"))
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
