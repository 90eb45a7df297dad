from tests.show.conftest import run_folder  # noqa: F401
