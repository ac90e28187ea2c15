"""Runs that are resumed, or spread over servers, across fingerprints, GPUs and kernels."""

import dataclasses
import logging
from contextlib import closing

import pytest
from fake_server import INFO, FakeServer, serve

from scoremode import AsyncScoreClient, OutputError, ServerInfo
from scoremode.errors import ServersDifferError
from scoremode.runs.corpora import Corpus
from scoremode.runs.journal import open_journal
from scoremode.runs.plan import Plan, WindowNlls
from scoremode.runs.pool import Pool
from scoremode.windows import cut_windows
from scoremode.wire.protocol import ComputedBy

A100, H200 = ComputedBy(device="A100", kernels=["k"]), ComputedBy(device="H200", kernels=["k"])
OLD, NEW = "0" * 32, "v2-" + "0" * 32


def plan(**server) -> Plan:
    return Plan(
        corpus=Corpus("text", "some text", "made up", 1),
        server=ServerInfo(**{**INFO, **server}),
        model="bytes",
        method="disjoint",
        context_length=4,
        stride=4,
        max_tokens=None,
        add_special_tokens=True,
        tokens=list(range(13)),
        num_bytes=9,
        num_words=2,
        windows=cut_windows(13, "disjoint", 4),
    )


def begin(path, begun: Plan) -> None:
    with closing(open_journal(path, begun)) as journal:
        journal.add(WindowNlls(1, 3, 6.0, [1.0, 2.0, 3.0]), 1.0)


def server_before(path) -> None:
    """Take from a journal's header what servers did not tell before."""
    header, rest = path.read_text().split("\n", 1)
    path.write_text(header.replace('"server.revision": null, ', "") + "\n" + rest)


def test_a_journal_with_an_old_fingerprint_resumes_with_a_warning(tmp_path, caplog):
    begin(path := tmp_path / "journal", plan(fingerprint=OLD))
    server_before(path)
    resumed = plan(fingerprint=NEW, revision="a" * 40, computed_by=H200)
    with closing(open_journal(path, resumed)) as journal:
        assert list(journal.windows) == [1]
    (warning,) = caplog.records
    assert (warning.levelno, str(path) in warning.getMessage()) == (logging.WARNING, True)
    with pytest.raises(OutputError, match=r"server\.dtype is 'float32' instead of 'float16'"):
        open_journal(path, dataclasses.replace(resumed, server=resumed.server.model_copy(update={"dtype": "float16"})))


@pytest.mark.parametrize(
    ("changes", "name"), [({"fingerprint": "v2-1"}, "fingerprint"), ({"revision": "b"}, "revision")]
)
def test_a_journal_of_other_contents_or_another_commit_is_refused(tmp_path, changes, name):
    begin(path := tmp_path / "journal", plan(fingerprint=NEW, revision="a"))
    with pytest.raises(OutputError, match=rf"server\.{name} is"):
        open_journal(path, plan(**{"fingerprint": NEW, "revision": "a", **changes}))


def test_a_journal_of_another_gpu_resumes_with_a_warning(tmp_path, caplog):
    begin(path := tmp_path / "journal", plan(fingerprint=NEW, computed_by=A100))
    open_journal(path, plan(fingerprint=NEW, computed_by=A100)).close()
    assert not caplog.records
    open_journal(path, plan(fingerprint=NEW, computed_by=H200)).close()
    (warning,) = caplog.records
    assert "device is 'A100' instead of 'H200'" in warning.getMessage()


async def test_servers_of_other_gpus_share_a_run_with_a_warning_and_those_of_other_weights_do_not(caplog):
    async with AsyncScoreClient("http://one") as one, AsyncScoreClient("http://two") as two:
        infos = [ServerInfo(**INFO, fingerprint=NEW, computed_by=each) for each in (A100, H200)]
        Pool([one, two], infos, None)
        (warning,) = caplog.records
        assert "http://two does not serve the same as http://one" in warning.getMessage()
        assert "device is 'H200' instead of 'A100'" in warning.getMessage()
        other = infos[1].model_copy(update={"fingerprint": "v2-1"})
        with pytest.raises(ServersDifferError, match="fingerprint is"):
            Pool([one, two], [infos[0], other], None)


async def test_the_fingerprint_is_asked_for_of_the_adapter_that_is_measured():
    asked = []

    class Adapters(FakeServer):
        def __call__(self, request):
            asked.append(str(request.url))
            return super().__call__(request)

    with serve(Adapters()) as url:
        async with AsyncScoreClient(url, model="an adapter/1") as client:
            await client.info()
        async with AsyncScoreClient(url) as client:
            await client.info()
    assert [each.partition("/v1/score")[2] for each in asked] == ["?model=an%20adapter%2F1", ""]
