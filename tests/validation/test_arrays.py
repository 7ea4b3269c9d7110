from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from cdr_kernel import FactStore
from cdr_kernel.validation._arrays import as_array, factor

ROWS = [[1.0, -2.0], [3.0, 4.0]]
TENSORS = {
    "sparse": lambda t: t.to_sparse(),
    "sparse rows": lambda t: t.to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor([t[0], t[1, :1]]),
    "jagged": lambda t: torch.nested.nested_tensor([t[0], t[1, :1]], layout=torch.jagged),
    "meta": lambda t: t.to("meta"),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "quantised": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "in a list": lambda t: list(t.requires_grad_()),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_are_not_dense_are_errors_that_name_the_argument(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these are prototypes
        tensor = TENSORS[kind](torch.tensor(ROWS))
        with pytest.raises(ValueError, match="query: expected a regular 2-dimensional array of numbers"):
            as_array(tensor, 2, "query")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_dense_tensors_are_taken_however_they_are_viewed(dtype):
    tensor = torch.tensor(ROWS).to(dtype)
    for view in (tensor, tensor.T.contiguous().T, torch._neg_view(-tensor)):
        assert as_array(view, 2, "query").tolist() == ROWS
    assert as_array(torch.tensor(ROWS, requires_grad=True), 2, "query").tolist() == ROWS
    negated = torch.complex(torch.zeros(2, 2), -torch.tensor(ROWS)).conj().imag
    assert negated.is_neg()
    assert as_array(negated, 2, "query").tolist() == ROWS
    with pytest.raises(TypeError, match="query: expected float16, float32 or float64, got complex64"):
        as_array(torch.complex(torch.ones(2, 2), torch.ones(2, 2)).conj(), 2, "query")


def test_what_is_no_array_is_named():
    store = FactStore(2, embedding_model="toy")
    for given in (store, store.view(), None):
        with pytest.raises(TypeError, match=f"float16, float32 or float64, got {type(given).__name__}$"):
            as_array(given, 2, "embeddings")


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([[1, 2], None], TypeError, "in row 1, got None"),
        ([None, [1, 2]], TypeError, "in row 0, got None"),
        (([1, 2], [3]), ValueError, "in row 1, got 1 numbers where row 0 has 2"),
        ([[1, 2], ["3", "4"]], TypeError, "in row 1, got one with str at place 0"),
        (np.array([np.ones(2), None], object), TypeError, "in row 1, got None"),
        ([torch.ones(2), torch.ones(1, 2)], ValueError, r"in row 1, got an array of shape \[1, 2\]"),
    ],
)
def test_the_first_vector_that_is_none_is_named(rows, error, message):
    with pytest.raises(error, match=f"coverage: expected a vector of numbers {message}"):
        as_array(rows, 2, "coverage")


def test_masked_values_are_errors():
    masked = np.ma.array(ROWS, mask=[[False, True], [False, False]])
    for given in (masked, [masked[0], masked[1]], (masked[1], masked[0])):
        with pytest.raises(ValueError, match="query: expected no masked values"):
            as_array(given, 2, "query")
    with pytest.raises(ValueError, match="importance: expected no masked values"):
        factor(masked[0], 2, "importance")
    assert as_array(np.ma.array(ROWS), 2, "query").tolist() == ROWS  # nothing is masked
