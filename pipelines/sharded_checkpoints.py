"""A look at a sharded checkpoint before torch reads it: its index and small values are pickles, and torch trusts them.

torch.distributed.checkpoint unpickles `.metadata` and the values that are no tensors (such as the learning rate)
without any limit, so that a checkpoint from elsewhere could execute what it likes. Here both are read first with
nothing allowed but the classes that an index is made of, and tensors and plain values.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

METADATA = ".metadata"
"""What torch.distributed.checkpoint writes last into a folder of shards."""
INDEX_CLASSES = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
                *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("collections", "OrderedDict"),
    }
)


class IndexUnpickler(pickle.Unpickler):
    """Unpickles an index of shards, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as in pickle
        """Return one of the classes of an index, or a dtype.

        Raises:
            UnpicklingError: for anything else.
        """
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in INDEX_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index asks for {module}.{name}, which no index needs")


def check_shards(folder: Path) -> None:
    """Check the index of a folder of shards, that the shards are there, and the values that are no tensors.

    Args:
        folder: as torch.distributed.checkpoint writes it.

    Raises:
        Exception: of any kind, if something is missing, damaged or other than what training writes.
    """
    with (folder / METADATA).open("rb") as file:
        index = IndexUnpickler(file).load()
    if not isinstance(index, Metadata) or not index.storage_data:
        raise ValueError("its index names no shards")
    for entry, place in index.storage_data.items():
        shard = folder / place.relative_path
        if shard.parent != folder or place.transform_descriptors:
            raise ValueError(f"its index names {place.relative_path}, which no training writes")
        if place.length < 0 or place.offset < 0 or shard.stat().st_size < place.offset + place.length:
            raise ValueError(f"{place.relative_path} is shorter than its index says")
        if isinstance(index.state_dict_metadata[entry.fqn], BytesStorageMetadata):
            with shard.open("rb") as file:
                file.seek(place.offset)
                torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
