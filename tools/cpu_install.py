"""Makes CUDA builds of torchvision, torchaudio and torchcodec work with a CPU build of torch.

vLLM's metadata requires these packages. Some package indexes have only CUDA builds, which fail at
import with a CPU torch. This script removes torchaudio and torchcodec, which nothing here needs. For
torchvision, transformers and vLLM use only its Python transforms, which work if two operator schemas
are defined before the import.

`make install` runs `python tools/cpu_install.py` in the virtual environment. If all imports work, the
script changes nothing. Otherwise it copies itself and a `.pth` file into site-packages, so that every
process defines the schemas.
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
    """The `.pth` file calls this at the start of each process."""
    sys.meta_path.insert(0, _DefineSchemasFirst())


def imports(module: str) -> bool:
    """Whether a new process can import `module`."""
    return (
        subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode
        == 0
    )


def main() -> None:
    """Removes or repairs packages that cannot be imported."""
    for module in ("torchaudio", "torchcodec"):
        if importlib.util.find_spec(module) and not imports(module):
            subprocess.run([sys.executable, "-m", "pip", "uninstall", "-qy", module], check=True)
            print(f"removed {module}: this index has no CPU build, and nothing here needs it")
    if imports("torchvision"):
        return
    packages = Path(sysconfig.get_paths()["purelib"])
    shutil.copy(__file__, packages / "titopool_cpu_install.py")
    hook = "import titopool_cpu_install; titopool_cpu_install.install_hook()\n"
    (packages / "titopool_cpu_install.pth").write_text(hook)
    if not imports("torchvision"):
        sys.exit("torchvision cannot be imported, even after its operator schemas are defined")
    print("this index has no CPU build of torchvision: its operator schemas are defined at import")


if __name__ == "__main__":
    main()
