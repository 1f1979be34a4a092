# For pyright, a third of whose work was to read the 2,000 files of models behind these names.
from typing import Any

def __getattr__(name: str) -> Any: ...
