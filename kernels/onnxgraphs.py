"""Convert torch.export programs to ONNX.

torch's ONNX optimizer is not used: it deletes additions of 1e-8 and less, such as our epsilons.
"""

from __future__ import annotations

import onnx_ir
import onnxscript.optimizer
import torch
from onnx_ir.passes import common
from onnxscript import opset20 as op

FLOAT, DOUBLE = onnx_ir.DataType.FLOAT.value, onnx_ir.DataType.DOUBLE.value


def _ints(*values: int):
    return op.Constant(value_ints=list(values))


def _lerp(self, end, weight):
    """self + weight (end - self), without torch's case for weight >= 1/2, which doubles the work"""
    return op.Add(self, op.Mul(weight, op.Sub(end, self)))


def _nan_to_num(self, nan=0.0, posinf=0.0, neginf=0.0):
    finite = op.LessOrEqual(op.Abs(self), op.Constant(value_float=3.4028234663852886e38))
    return op.Where(finite, self, op.Constant(value_floats=[0.0]))


def _power(self, exponent):
    return op.Mul(self, self) if exponent == 2 else op.Pow(self, op.CastLike(exponent, self))


def _mean(self, dim, keepdim=False, dtype=None):
    """The mean over one axis: sum pieces of it in float32, and these sums in float64.

    onnxruntime adds floats one after another: ReduceMean over a million entries is off by 2e-4. A
    piece has as many entries as the largest power of two that divides the axis, at most 1024.
    """
    rank = len(self.shape)
    axis = dim[0] % rank
    size = op.Shape(self, start=axis, end=axis + 1)
    piece = op.Min(op.BitwiseAnd(size, op.Neg(size)), _ints(1024))
    shape = [op.Shape(self, end=axis)] if axis else []
    shape += [_ints(-1), piece]
    shape += [op.Shape(self, start=axis + 1)] if axis < rank - 1 else []
    sums = op.ReduceSum(op.Reshape(self, op.Concat(*shape, axis=0)), _ints(axis + 1), keepdims=0)
    total = op.ReduceSum(op.Cast(sums, to=DOUBLE), _ints(axis), keepdims=int(keepdim))
    return op.Cast(op.Div(total, op.Cast(size, to=DOUBLE)), to=FLOAT)


aten = torch.ops.aten
TRANSLATIONS = {aten.lerp.Tensor: _lerp, aten.nan_to_num.default: _nan_to_num}
TRANSLATIONS |= {aten.pow.Tensor_Scalar: _power, aten.mean.dim: _mean}


def convert(
    program: torch.export.ExportedProgram,
    name: str,
    inputs: dict[str, tuple[int | str, ...]],  # names and shapes; strings are free sizes
    outputs: dict[str, tuple[int | str, ...]],
    metadata: dict[str, str],
) -> bytes:
    """An ONNX file: constants folded, unused and repeated nodes removed, no debug information."""
    options = {"dynamo": True, "optimize": False, "verbose": False, "opset_version": 20}
    exported = torch.onnx.export(program, custom_translation_table=TRANSLATIONS, **options)
    model = onnx_ir.from_proto(onnx_ir.to_proto(exported.model))
    common.InlinePass()(model)
    onnxscript.optimizer.fold_constants(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    graph = model.graph
    for values, named in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, (k, shape) in zip(values, named.items(), strict=True):
            value.name, value.shape = k, onnx_ir.Shape(shape)
    for node in graph:
        node.name = None
    graph.name, model.ir_version = name, 10
    model.metadata_props.clear()
    model.metadata_props.update(metadata)
    proto = onnx_ir.to_proto(model)
    proto.graph.ClearField("value_info")  # types of inner values, half of the file
    return proto.SerializeToString()
