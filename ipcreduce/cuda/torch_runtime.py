"""PyTorch's tensors, streams and allocator, in a program that has imported PyTorch. This module never imports it.

PyTorch's allocator reuses memory in the order of the stream on which it was allocated. So a tensor may be freed after a
call on that stream. A call that uses it on another stream has to tell PyTorch: :func:`use_on`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from ..dtypes import DTYPES
from ..errors import UnsupportedError
from ..types import Stream
from . import streams

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_OTHER_DTYPES = ("bool", "complex64", "complex128")
torch: Any = None  # once a tensor has been looked for in a program that has imported it
# Objects of PyTorch, kept here for speed.
kinds: tuple[Any, Any] = (None, None)  # torch.Tensor and Parameter, without subclasses, which can mean anything
strided: Any = None
_untraced = False
_dtypes: dict[Any, np.dtype[Any]] = {}
_of_numpy: dict[np.dtype[Any], Any] = {}  # the same, the other way round
get_stream: Any = None  # a function: the device's ordinal -> its current stream's handle; None without a GPU
is_tracing: Any = None  # a function: does torch.jit.trace run in this thread?
modes: Any = None  # the module that knows whether a TorchDispatchMode is on
duals: Any = None  # the module of forward-mode derivatives
is_zero: Any = None  # a function: is this a tensor of zeros without memory?
is_transformed: Any = None  # a function: is this a tensor of torch.func's transforms, which have no memory?
_waiting: dict[int, Any] = {}  # a stream of PyTorch's pool for use_on(), by the device's ordinal


def _nothing(*_: Any) -> None:
    """Return None, in place of a function that this version of PyTorch lacks."""


def _bind(found: Any) -> None:
    global torch, kinds, strided, _dtypes, _of_numpy, get_stream, is_tracing, modes, duals, is_zero, is_transformed
    kinds = found.Tensor, getattr(getattr(found, "nn", None), "Parameter", None)
    strided = getattr(found, "strided", None)
    names = [name for name in (*(dtype.name for dtype in DTYPES), *_OTHER_DTYPES) if hasattr(found, name)]
    _dtypes = {getattr(found, name): _BFLOAT16 if name == "bfloat16" else np.dtype(name) for name in names}
    _of_numpy = {of_numpy: of_torch for of_torch, of_numpy in _dtypes.items()}
    get: Any = None
    if found.cuda.is_available():
        get = getattr(getattr(found, "_C", None), "_cuda_getCurrentRawStream", None)
        get = get or (lambda device: found.cuda.current_stream(device).cuda_stream)
    get_stream = get
    is_tracing = _of(found, "_C._is_tracing", _nothing)
    is_zero = _of(found, "Tensor._is_zerotensor", _nothing)
    is_transformed = _of(found, "_C._functorch.is_functorch_wrapped_tensor", _nothing)
    no_modes, no_duals = SimpleNamespace(_is_in_torch_dispatch_mode=False), SimpleNamespace(_current_level=-1)
    modes, duals = _of(found, "utils._python_dispatch", no_modes), _of(found, "autograd.forward_ad", no_duals)
    torch = found  # last: other threads use the names above once they see this one


def _of(found: Any, path: str, otherwise: Any) -> Any:
    try:
        return attrgetter(path)(found)
    except AttributeError:
        return otherwise


def _is_imported() -> bool:
    global _untraced
    found = sys.modules.get("torch")
    if found is None:
        return False
    if found is not torch:
        if not (hasattr(found, "Tensor") and hasattr(found, "cuda")):  # another thread is importing it
            return False
        if getattr(found.__spec__, "_initializing", False):
            return False
        _bind(found)
    if not _untraced and "torch._dynamo.trace_rules" in sys.modules:
        _untraced = True  # torch.compile does not trace into this package
        with suppress(Exception):  # the set has no public name, and may move
            sys.modules["torch._dynamo.trace_rules"].add(__name__.partition(".")[0])
    return True


def is_tensor(array: Any) -> bool:
    """True for a PyTorch tensor."""
    return _is_imported() and isinstance(array, kinds[0])


def works() -> bool:
    """True if the program has imported PyTorch, and PyTorch can use GPUs."""
    return _is_imported() and get_stream is not None


def is_plain_type(kind: type) -> bool:
    """True for torch.Tensor and Parameter, and False for other subclasses, which DLPack asks for their memory."""
    return _is_imported() and (kind is kinds[0] or kind is kinds[1])  # `in` would call the metaclass's __eq__


def is_wrapper_type(kind: type) -> bool:
    """True for a tensor type with operators of its own. Its tensors may have no memory, as those of DTensor."""
    if not _is_imported() or not issubclass(kind, kinds[0]):
        return False
    return getattr(kind, "__torch_dispatch__", None) is not getattr(kinds[0], "__torch_dispatch__", None)


# ---- for the fast path: cupy_runtime has the same functions
def plain(tensor: Any, device: int) -> tuple[int, Any, Any] | None:
    """Address, shape and dtype of a contiguous tensor of numbers on this GPU; None for any other, and in a trace.

    All three may change for the same object: by ``set_()``, by ``resize_()``, or by an assignment to ``.data``.
    """
    kind = type(tensor)
    if (
        (kind is not kinds[0] and kind is not kinds[1])
        or tensor.get_device() != device
        or tensor.layout is not strided
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or tensor.is_conj()
        or is_zero(tensor)
        or (tensor.requires_grad and torch.is_grad_enabled())
        or is_tracing()
        or modes._is_in_torch_dispatch_mode
        or duals._current_level >= 0
    ):
        return None
    try:
        address = tensor.data_ptr()
        return (address, tensor.shape, tensor.dtype) if address else None
    except RuntimeError:  # a tensor of torch.func has no memory, and a nested tensor has no shape
        return None


def can_be_cached(dtype: Any) -> bool:
    """True for real dtypes. A complex tensor may become a conjugated one while the object stays the same."""
    return not dtype.is_complex


def dtype_of(dtype: Any) -> np.dtype[Any] | None:
    """NumPy's dtype for a dtype of PyTorch; None if it cannot be reduced."""
    return _dtypes.get(dtype)


def stream_handle(device: int) -> Stream:
    """The handle of PyTorch's current stream on a GPU."""
    return get_stream(device)


def empty_like(tensor: Any, device: int) -> tuple[Any, int]:
    """A new tensor like a contiguous one, from PyTorch's allocator and for its current stream, and its address.

    The address is 0 for a tensor that is constant to torch.func.
    """
    result = torch.empty_like(tensor)
    try:
        return result, result.data_ptr()
    except RuntimeError:
        return result, 0


def empty(like: Any, shape: Any, dtype: Any, device: int) -> tuple[Any, int]:
    """A new tensor of this shape and dtype on the device of ``like``, and its address: see :func:`empty_like`."""
    result = torch.empty(shape, dtype=dtype, device=like.device)
    try:
        return result, result.data_ptr()
    except RuntimeError:
        return result, 0


# ---- streams
def current_stream(device: int) -> tuple[Stream, Any]:
    """The handle of PyTorch's current stream on a GPU, and the stream object."""
    stream = torch.cuda.current_stream(device)
    return Stream(int(stream.cuda_stream)), stream


def keeps(owner: Any) -> bool:
    """True for a stream of PyTorch's pool, which lives as long as the process.

    The ids of the pool's streams are odd, and those of external streams are even. Source: c10/cuda/CUDAStream.cpp, from
    PyTorch 2.0 on.
    """
    kind = getattr(getattr(torch, "cuda", None), "Stream", None)
    return kind is not None and type(owner) is kind and bool(getattr(owner, "stream_id", 0) & 1)


@contextmanager
def on_stream(stream: Stream, device: int) -> Iterator[None]:
    """Make a stream PyTorch's current one in the block, if the program has imported PyTorch."""
    if not works() or stream_handle(device) == stream:
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
        yield


def new_on(tensor: Any, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Stream) -> Any:
    """A new contiguous tensor on the device of ``tensor``, from PyTorch's allocator, for use on ``stream``."""
    with on_stream(stream, tensor.get_device()):
        return torch.empty(shape, dtype=_of_numpy[dtype], device=tensor.device)


def use_on(tensor: Any, stream: Stream, owner: Any) -> None:
    """Let PyTorch keep a tensor's memory until the present work on ``stream`` is done, even if the tensor is freed.

    PyTorch uses the stream when the tensor is freed, and the program may have closed a stream of its own by then. So
    PyTorch is told of a stream of its pool, which waits for the present work on ``stream``.
    """
    device = tensor.get_device()
    if stream == stream_handle(device):
        return
    if stream > 1 and not keeps(owner):
        if streams.capture_id(stream):  # the work runs when the graph is launched, and nothing here knows when
            return
        if device not in _waiting:
            _waiting[device] = torch.cuda.Stream(device)
        own = Stream(int(_waiting[device].cuda_stream))
        streams.let_wait(own, stream)
        stream = own
    tensor.record_stream(torch.cuda.ExternalStream(stream, device=tensor.device))


def order(device: int, stream: Stream) -> None:
    """Let ``stream`` wait for PyTorch's current stream on a GPU, if they differ."""
    current = stream_handle(device)
    if current != stream:
        streams.let_wait(stream, current)


# ---- memory
Place = tuple[int, tuple[int, ...], np.dtype[Any], tuple[int, ...], int]


def place_of(tensor: Any) -> Place | None:
    """Address, shape, dtype, strides in bytes and device of a tensor on a GPU; None for any other tensor.

    The tensor must have no :func:`torch_tensors.problem`.
    """
    if type(tensor) not in kinds or not tensor.is_cuda:
        return None
    dtype = _dtypes.get(tensor.dtype)
    if dtype is None:
        return None
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    return tensor.data_ptr(), tuple(tensor.shape), dtype, strides, tensor.get_device()


def check_allocator() -> None:
    """Check that PyTorch can reserve memory for a recording. :raises UnsupportedError: if it cannot."""
    name = getattr(torch.cuda, "get_allocator_backend", str)() if works() else ""
    if name == "cudaMallocAsync":
        raise UnsupportedError(
            "PyTorch's allocator is cudaMallocAsync, which cannot reserve memory for a recording. Start the program "
            "with backend:native in PYTORCH_CUDA_ALLOC_CONF, or without that variable"
        )


def make_pool() -> Any:
    """A torch.cuda.MemPool: memory that PyTorch uses for nothing else while the pool lives.

    :returns: None if the program has not imported PyTorch, or for PyTorch before 2.6.
    """
    if not works() or not hasattr(torch.cuda, "MemPool"):
        return None
    torch.cuda.init()  # now, because it cannot be done within a capture
    return torch.cuda.MemPool()


@contextmanager
def allocating(pool: Any, stream: Stream, device: int) -> Iterator[None]:
    """Let PyTorch use ``stream`` and a pool of :func:`make_pool` in this thread, in the block."""
    if pool is None:
        yield
        return
    with on_stream(stream, device), torch.cuda.use_mem_pool(pool, device=device):
        yield


def detached(tensor: Any) -> Any:
    """The tensor without its gradient, as NumPy takes it. A bfloat16 tensor on the host is returned as int16 bits."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16 and tensor.device.type == "cpu":
        return tensor.view(torch.int16)
    return tensor


def of_numpy(array: np.ndarray[Any, Any]) -> Any:
    """A tensor over the memory of a NumPy array. An empty one is new: NumPy's strides there are 0."""
    if not array.size:
        return torch.empty(array.shape, dtype=_of_numpy[array.dtype])
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_bytes(tensor: Any) -> Any:
    """A tensor of e4m3 as one of bytes, over the same memory. Any other array is returned as it is."""
    return tensor.view(torch.uint8) if is_tensor(tensor) and tensor.dtype is _float8() else tensor


def float8_as_bytes(tensor: Any) -> Any:
    """A tensor of any float of 8 bits as one of bytes, over the same memory. Any other array is returned as it is."""
    if not is_tensor(tensor) or tensor.dtype.itemsize != 1 or not tensor.dtype.is_floating_point:
        return tensor
    return tensor.view(torch.uint8)


def float8_of_bytes(tensor: Any, like: Any) -> Any:
    """Undo :func:`float8_as_bytes` for a result, if it was done to ``like``."""
    return tensor.view(like.dtype) if is_tensor(tensor) and tensor.dtype is not like.dtype else tensor


def of_bytes(tensor: Any) -> Any:
    """A tensor of bytes as one of e4m3, over the same memory; the tensor itself where PyTorch has no such dtype."""
    return tensor if _float8() is None else tensor.view(_float8())


def _float8() -> Any:
    return getattr(torch, "float8_e4m3fn", None)


def over(array: Any, tensor: Any) -> Any:
    """A tensor over the memory of a contiguous CuPy array, on the device of ``tensor``.

    The new tensor keeps the array alive. No stream waits for another.
    """
    dtype = _of_numpy[array.dtype]
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device=tensor.device)
    flat = torch.as_tensor(array.reshape(-1).view(np.uint8), device=tensor.device)
    return flat.view(dtype).view(array.shape)
