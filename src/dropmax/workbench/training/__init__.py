"""Training: the loop, the run directory it writes, and the trained model it leaves."""

from __future__ import annotations

from dropmax.workbench.training.callbacks import Callback, MLflow, TensorBoard, WandB
from dropmax.workbench.training.loop import Diverged, Interrupted, fit, resume, train
from dropmax.workbench.training.rundir import RunDirectory, load_data
from dropmax.workbench.training.session import Session
from dropmax.workbench.training.trained import TrainedModel, build, load_model, save_model

__all__ = [
    "Callback", "Diverged", "Interrupted", "MLflow", "RunDirectory", "Session", "TensorBoard", "TrainedModel",
    "WandB", "build", "fit", "load_data", "load_model", "resume", "save_model", "train",
]  # fmt: skip
