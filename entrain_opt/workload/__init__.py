"""What the data costs: sizes of samples and media, before anything is decoded or trained."""

from entrain_opt.workload.samples import SampleTable

__all__ = ["SampleTable"]
