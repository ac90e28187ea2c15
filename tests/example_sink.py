"""The package of docs/extend.md, installed into a folder as pip would."""

import re
import tomllib
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "extend.md"


def install(folder: Path) -> Path:
    """Write the page's module, and the metadata of its project, into a folder for PYTHONPATH."""
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2])
    project = tomllib.loads(blocks["toml"])["project"]
    (module,) = {value.partition(":")[0] for value in project["entry-points"]["scoremode.sinks"].values()}
    (folder / f"{module}.py").write_text(blocks["python"])
    metadata = folder / f"{module}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["scoremode.sinks"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[scoremode.sinks]", *lines]) + "\n")
    return folder
