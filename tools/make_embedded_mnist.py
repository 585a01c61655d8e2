"""Make src/dropmax/workbench/data/embedded/mnist-20k.xz from the four official MNIST files.

    python tools/make_embedded_mnist.py DATA_DIR

DATA_DIR holds the official idx files, plain or gzipped. The rule and the file's layout are in
dropmax/workbench/data/mnist.py.
Prints the SHA-256 of the unpacked content, which tests/workbench/data/test_mnist.py records.
"""

from __future__ import annotations

import hashlib
import lzma
import sys
from pathlib import Path

import numpy as np

from dropmax.workbench.data.mnist import FILES, choose_embedded, find_mnist, read_mnist

TARGET = Path(__file__).resolve().parents[1] / "src/dropmax/workbench/data/embedded/mnist-20k.xz"


def main(data_dir: Path) -> None:
    """Read, choose, pack, write."""
    files = find_mnist(data_dir)
    if len(files) < len(FILES):
        sys.exit(f"{data_dir} lacks {', '.join(sorted(FILES.keys() - files.keys()))}")
    images, labels = read_mnist(files, "train")
    test_images, test_labels = read_mnist(files, "t10k")
    rows = np.concatenate(choose_embedded(labels))
    content = b"".join(
        [
            images[rows].tobytes(),
            test_images.tobytes(),
            labels[rows].tobytes(),
            test_labels.tobytes(),
            rows.astype("<u2").tobytes(),
        ]
    )
    # lc=4 and pb=0 suit bytes without alignment. The check makes unpacking verify; SHA-256 would take a third longer.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]
    packed = lzma.compress(content, check=lzma.CHECK_CRC64, filters=filters)
    TARGET.write_bytes(packed)
    print(f"{TARGET}: {len(packed):,} bytes, content sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
