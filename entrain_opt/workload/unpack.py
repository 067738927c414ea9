"""Parquet -> mapped Arrow files, so that training reads single rows.

One row of a Parquet file costs its whole row group, often hundreds of megabytes. So the columns that training reads are
written once as an Arrow file in the cache folder, and mapped by every process of the machine. Rows that cannot be read
become nulls, which keeps all other rows at their numbers; the index has reported them.

Promise: a copy appears whole or not at all, is made once however many processes ask, and is made anew when the file
changes. Price: as much disk as the columns take unpacked (images hardly shrink in Parquet), written at disk speed.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from entrain_opt.workload.bad_samples import BadSample
from entrain_opt.workload.columns import Arrow, Parquet
from entrain_opt.workload.shards import file_state


def unpack_parquet(shard: Parquet, cache_dir: Path) -> Arrow:
    """The rows of a Parquet file as a mapped Arrow file.

    Args:
        shard: the file.
        cache_dir: where the copy is kept, in the folder `rows`.
    """
    import pyarrow as pa
    from filelock import FileLock

    key = hashlib.sha256(str(shard.path.resolve()).encode() + file_state(shard.path)).hexdigest()[:24]
    copy = cache_dir / "rows" / f"{key}.arrow"
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(copy.with_suffix(".lock")):
            if not copy.exists():
                columns = shard.layout.columns
                schema = pa.schema([shard.file.schema_arrow.field(name).with_nullable(True) for name in columns])
                scratch = copy.with_name(f"{copy.name}.{os.getpid()}.partial")
                try:
                    with pa.OSFile(str(scratch), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                        for _, batch in shard.batches(0, len(shard), columns):
                            rows = batch.num_samples if isinstance(batch, BadSample) else batch.num_rows
                            arrays = [
                                pa.nulls(rows, field.type) if isinstance(batch, BadSample) else batch.column(field.name)
                                for field in schema
                            ]
                            writer.write_batch(pa.record_batch(arrays, schema=schema))
                    scratch.replace(copy)
                finally:
                    scratch.unlink(missing_ok=True)
    return Arrow(copy, shard.name, shard.path)
