"""What features of a photograph cost, in float32, bfloat16 and int8: ``python -m benchmarks.embedding PHOTOS --out F``.

PHOTOS is a folder of images. Times are processor time per photograph, the least of ``--rounds`` batches of 32, which
other processes disturb less than the clock on the wall. The features of bfloat16 and int8 are compared with those of
float32 by their cosine and by the relative error, ``|x - y| / |y|`` over the batch. int8 is onnxruntime's static
quantisation, calibrated on the photographs themselves, which flatters it.
"""

from __future__ import annotations

import copy
import importlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.rows import append, parser
from dropmax.workbench.backbones import Lite, load_backbone
from dropmax.workbench.data.unlabelled import find_inputs
from dropmax.workbench.embedding import image_for

BATCH = 32


def least(work: Callable[[], Any], rounds: int) -> tuple[float, float, Any]:
    """Return the least processor time and wall time per photograph, in milliseconds, and what ``work`` returned."""
    found = work()
    processor, wall = [], []
    for _ in range(rounds):
        started, began = time.process_time(), time.perf_counter()
        found = work()
        processor.append(time.process_time() - started)
        wall.append(time.perf_counter() - began)
    return 1000 * min(processor) / BATCH, 1000 * min(wall) / BATCH, found


def bfloat16(graph: Lite, images: Tensor) -> Callable[[], Tensor]:
    net = copy.deepcopy(graph.net).bfloat16()

    @torch.inference_mode()
    def work() -> Tensor:
        pixels = (images.to(memory_format=torch.channels_last).float() / 255 - 0.498) / 0.502
        features: Tensor = net.extract_features(pixels.bfloat16()).float().mean((2, 3))
        return features

    return work


def int8(graph: Lite, images: Tensor, threads: int) -> Callable[[], Tensor]:
    onnxruntime: Any = importlib.import_module("onnxruntime")  # it has no types
    tools: Any = importlib.import_module("onnxruntime.quantization")

    class Photographs(tools.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [pixels[start : start + 8] for start in range(0, BATCH, 8)]

        def get_next(self) -> dict[str, Any] | None:
            return {"pixels": self.left.pop().numpy()} if self.left else None

    class Net(torch.nn.Module):
        def forward(self, pixels: Tensor) -> Tensor:
            features: Tensor = plain.features(pixels)
            return features

    plain = copy.deepcopy(graph).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    pixels = images.float() / 255
    with tempfile.TemporaryDirectory() as place:
        whole, small = Path(place, "whole.onnx"), Path(place, "int8.onnx")
        shapes = {"pixels": {0: torch.export.Dim.DYNAMIC}}
        program = torch.onnx.export(
            Net().eval(), (pixels[:2],), dynamo=True, dynamic_shapes=shapes, input_names=["pixels"], verbose=False
        )
        assert program is not None
        whole.write_bytes(program.model_proto.SerializeToString())
        tools.quant_pre_process(str(whole), str(whole))
        tools.quantize_static(
            str(whole),
            str(small),
            Photographs(),
            per_channel=True,
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
        )
        content = small.read_bytes()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda: torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("photos", type=Path)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--kinds", nargs="*", default=["float32", "bfloat16", "int8"])
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    backbone = load_backbone("efficientnet-lite0")
    assert isinstance(backbone.graph, Lite)
    files = find_inputs([options.photos])[:BATCH]
    decoding, _, pixels = least(lambda: np.stack([image_for(file, backbone) for file in files]), options.rounds)
    images = torch.from_numpy(pixels)
    exact = backbone(images)
    work: dict[str, Callable[[], Callable[[], Tensor]]] = {
        "float32": lambda: lambda: backbone(images),
        "bfloat16": lambda: bfloat16(backbone.graph, images),  # type: ignore[arg-type]
        "int8": lambda: int8(backbone.graph, images, options.threads),  # type: ignore[arg-type]
    }
    for kind in options.kinds:
        processor, wall, features = least(work[kind](), options.rounds)
        row = {
            "kind": kind,
            "backbone": backbone.origin.name,
            "threads": options.threads,
            "decoding_ms": round(decoding, 3),
            "processor_ms": round(processor, 2),
            "wall_ms": round(wall, 2),
            "least_cosine": float(torch.cosine_similarity(features, exact).min()),
            "relative_error": float((features - exact).norm() / exact.norm()),
        }
        append(options.out, row)


if __name__ == "__main__":
    main()
