"""The images run as an ordinary user on a read-only root file system: all they write is on their volume or in /tmp.

docker/compose.yaml and docker/kubernetes.yaml mount them that way.
"""

import re
from pathlib import Path, PurePosixPath

import pytest
import yaml

from tests.neighbours import CACHES

DOCKER = Path(__file__).parents[2] / "docker"


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
    # What is written to a volume after it was declared is lost, and so is its owner.
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
