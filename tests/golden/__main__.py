"""Writes the golden answers and the document as they are now."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.api_schemas import document
from tests.golden.exchanges import all_exchanges
from tests.golden.play import DOCUMENT, play, write
from tests.golden.server import golden_server
from titopool.demo_model import make_model

with TemporaryDirectory() as name:
    model, root = Path(name, "model"), Path(name, "root")
    for folder in (model, root):
        folder.mkdir()
    make_model(model, seed=0)
    with golden_server(str(model), root) as url:
        write(play(all_exchanges(), url, str(model), str(root)))
DOCUMENT.write_text(json.dumps(document(), indent=1, ensure_ascii=False) + "\n")
