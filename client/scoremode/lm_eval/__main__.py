"""Registers the model `scoremode`, then runs lm-eval's command line, which must know all models from the start."""

import sys

from scoremode.errors import MissingPackageError, extra

try:
    with extra("lm-eval"):
        import lm_eval.api.model

        # Import lm-eval's own models first: it registers them only while no model is registered.
        import lm_eval.models
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.model import CachingLM
        from lm_eval.api.registry import register_model

        from scoremode.lm_eval.model import ScoremodeLM
except MissingPackageError as error:
    sys.exit(f"scoremode.lm_eval: {error}")


class NamedCache(CachingLM):
    """Stores answers for `--use_cache`, in a file named after everything that they depend on, except the request."""

    def __init__(self, lm: object, cache_db: str) -> None:
        name = f"-{lm.cache_name}.db" if isinstance(lm, ScoremodeLM) else ".db"
        super().__init__(lm, cache_db.removesuffix(".db") + name)
        # Commit many answers at a time: one commit per answer takes longer than scoring.
        self.dbdict.autocommit = self.dbdict.conn.autocommit = False


def main() -> None:
    register_model("scoremode")(ScoremodeLM)
    lm_eval.api.model.CachingLM = NamedCache
    cli_evaluate()


if __name__ == "__main__":
    main()
