"""Fabric's plugins, of which none are had."""

from weft.fabric._absent import DEVICES, absent

__getattr__ = absent(
    __name__,
    {
        "Say it by Fabric(precision=…).": "Precision MixedPrecision DoublePrecision HalfPrecision FSDPPrecision"
        " DeepSpeedPrecision TransformerEnginePrecision",
        "Quantise the model before fabric.setup.": "BitsandbytesPrecision",
        "fabric.save writes folders that any plan can load.": "CheckpointIO TorchCheckpointIO XLACheckpointIO",
        "`weft launch`, torchrun and Slurm are known without it.": "ClusterEnvironment LightningEnvironment"
        " SLURMEnvironment TorchElasticEnvironment KubeflowEnvironment LSFEnvironment MPIEnvironment",
        DEVICES: "XLAPrecision XLAEnvironment",
    },
)
