"""The images run as an ordinary user on a read-only root file system: all they write is on their volume or in /tmp.

docker/compose.yaml and docker/kubernetes.yaml mount them that way.
"""

import json
import re
from pathlib import Path, PurePosixPath

import pytest
import yaml

from tests.neighbours import CACHES

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in their order, each as its name and its arguments on one line."""
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def only(image: list[tuple[str, str]], wanted: str) -> str:
    """The arguments of the one instruction of that name."""
    (found,) = (rest for word, rest in image if word == wanted)
    return found


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_ordinary_user_owns_the_volume_and_every_cache_is_on_it(name):
    image = instructions(name)
    user, volume = only(image, "USER"), only(image, "VOLUME")
    environment = dict(pair for word, rest in image if word == "ENV" for pair in re.findall(r"(\w+)=(\S+)", rest))
    assert environment.keys() >= CACHES
    assert all(PurePosixPath(environment[cache]).is_relative_to(volume) for cache in CACHES)
    assert ("WORKDIR", volume) in image
    made = next(index for index, (word, rest) in enumerate(image) if word == "RUN" and "useradd" in rest)
    assert re.search(rf"--uid [1-9]\d* {user}\b", image[made][1])
    assert f"chown -R {user} {volume}" in image[made][1]
    # Files that are written to a volume after it was declared are lost, and so is its owner.
    assert made < image.index(("VOLUME", volume))


def test_compose_and_kubernetes_mount_what_the_image_writes_to():
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["scoremode"]
    pod = yaml.safe_load((DOCKER / "kubernetes.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    image = instructions("Dockerfile")
    volume = only(image, "VOLUME")
    assert service["read_only"] is container["securityContext"]["readOnlyRootFilesystem"] is True
    assert [*service["tmpfs"], *(mount.partition(":")[2] for mount in service["volumes"])] == ["/tmp", volume]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {volume, "/tmp", "/dev/shm"}
    assert any(f"--uid {pod['securityContext']['runAsUser']} " in rest for word, rest in image if word == "RUN")
    drain = int(container["args"][container["args"].index("--shutdown-timeout") + 1])
    assert pod["terminationGracePeriodSeconds"] > drain
    assert service["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?"), "it does not start without a key"


def test_the_proxy_passes_every_route_but_those_of_references():
    (passed,) = re.findall(r"^    location ~ (\S+) \{$", (DOCKER / "nginx.conf").read_text(), re.MULTILINE)
    routes = json.loads((ROOT / "openapi" / "openapi.json").read_text())["paths"]
    refused = {route for route in routes if not re.search(passed, route)}
    assert refused == {route for route in routes if re.match("/v1/(references|kld|layers)", route)}


def test_actions_of_other_repositories_are_pinned_by_hash():
    workflows = (ROOT / ".github" / "workflows").glob("*.yml")
    used = [name for path in workflows for name in re.findall(r"uses: (\S+)", path.read_text())]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name)] == []


def test_folders_that_readme_and_commands_make_are_ignored_by_git_and_docker():
    made = {*re.findall(r"-m venv (\S+)", (ROOT / "README.md").read_text()), "scoremode-quick", "scoremode-example"}
    assert ".venv" in made
    for name in (".gitignore", ".dockerignore"):
        assert made | {".venv-docs", "dist", "site"} <= {line.strip("/") for line in (ROOT / name).read_text().split()}
