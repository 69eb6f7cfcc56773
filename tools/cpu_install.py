"""Makes companions of torch that were built for another torch harmless beside a CPU torch.

Some package indexes have no CPU build of torchvision, torchaudio and torchcodec, which
vLLM's metadata asks for. Those built for CUDA fail at import. The last two are needed by
nothing here and are removed. torchvision's Python transforms, which are all that
transformers and vLLM use here, work once two operator schemas exist before the import.

`make install` runs `python tools/cpu_install.py` in the virtual environment. Where everything
imports, it changes nothing; else it copies itself into site-packages with a `.pth` file, so
that every process, spawned ones too, defines the schemas.
"""

import importlib.abc
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

SCHEMAS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class _DefineSchemasFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator, schema in SCHEMAS.items():
                if not hasattr(torch.ops.torchvision, operator.partition("::")[2]):
                    torch.library.define(operator, schema)
        return None


def install_hook() -> None:
    """Called by the `.pth` file at the start of each process."""
    sys.meta_path.insert(0, _DefineSchemasFirst())


def imports(module: str) -> bool:
    """Whether a new process can import `module`."""
    return (
        subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode
        == 0
    )


def main() -> None:
    """Removes or mends what does not import."""
    for module in ("torchaudio", "torchcodec"):
        if importlib.util.find_spec(module) and not imports(module):
            subprocess.run([sys.executable, "-m", "pip", "uninstall", "-qy", module], check=True)
            print(f"removed {module}: it has no CPU build here and nothing needs it")
    if imports("torchvision"):
        return
    packages = Path(sysconfig.get_paths()["purelib"])
    shutil.copy(__file__, packages / "titopool_cpu_install.py")
    hook = "import titopool_cpu_install; titopool_cpu_install.install_hook()\n"
    (packages / "titopool_cpu_install.pth").write_text(hook)
    if not imports("torchvision"):
        sys.exit("torchvision cannot be imported, even with its schemas defined")
    print("torchvision has no CPU build here: its missing schemas are defined at import")


if __name__ == "__main__":
    main()
