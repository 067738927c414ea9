"""The PyTorch Lightning side: a strategy that only delegates, the module, and the data module."""

from entrain_opt.lightning.datamodule import MultimodalDataModule
from entrain_opt.lightning.module import MultimodalModule
from entrain_opt.lightning.strategy import EntrainStrategy

__all__ = ["EntrainStrategy", "MultimodalDataModule", "MultimodalModule"]
