"""Makes a torchvision importable that was built for another torch: vision models need it, vLLM's and transformers'.

Its compiled part cannot be loaded then, and its Python part dies at import for want of two operators. They are declared
here, in the installed package, so that every process finds them; nothing is behind them. Image transforms are Python,
and work; `torchvision.ops` refuses with an error of its own. Does nothing where torchvision is missing or patched.
"""

from importlib.util import find_spec
from pathlib import Path

_MARK = "# declared by rayrft"
_DECLARED = f"""

if not _has_ops():  {_MARK}
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{{_name}}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

if __name__ == "__main__":
    package = find_spec("torchvision")
    if package is not None and package.origin is not None:
        extension = Path(package.origin).with_name("extension.py")
        if _MARK not in (text := extension.read_text()):
            extension.write_text(text + _DECLARED)
