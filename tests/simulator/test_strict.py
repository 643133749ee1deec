"""The check of Metal text without Apple's compiler: silent on good, exact on bad."""

import re
import sys
from pathlib import Path

import mlx.core as mx
import pytest

pytest.importorskip("clang.cindex", reason="needs libclang: pip install libclang")

from mlx_flash.simulator.strict import check_text

SIGNATURE = """
template <typename T, int D>
[[kernel]] void custom_kernel_example(
  const device T* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* weight [[buffer(2)]],
  const constant float& scale [[buffer(3)]],
  device T* out [[buffer(4)]],
  uint lane [[thread_index_in_simdgroup]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
"""


def kernel_text(body, *, header="", element="float", width=8):
    """Text as MLX generates it, of a kernel with one ``body`` and one ``header``."""
    last = instantiation(f"custom_kernel_example<{element}, {width}>")
    return f"{header}{SIGNATURE}{body}\n}}\n{last}"


def instantiation(kernel):
    return f'template [[host_name("f")]] [[kernel]] decltype({kernel}) {kernel};\n'


def generated_text(source, inputs, output_names=("out",), **options):
    """Text that MLX itself generates for a kernel of 64 threads."""
    kernel = mx.fast.metal_kernel(
        name="example",
        input_names=list(inputs),
        output_names=list(output_names),
        source=source,
        **options,
    )

    def launch(*arrays):
        return kernel(
            inputs=list(arrays),
            template=[("T", arrays[0].dtype)],
            grid=(64, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(64,) for _ in output_names],
            output_dtypes=[arrays[0].dtype for _ in output_names],
        )

    records = []
    mx.export_function(records.append, launch, *inputs.values())
    calls = [record for record in records if record.get("name") == "CustomKernel"]
    return calls[0]["arguments"][1]


def places(findings):
    return [(finding.line, finding.rule) for finding in findings]


def titled(table):
    """The titles of a table, each with the text below it."""
    pieces = re.split(r"^== (.*)\n", table, flags=re.MULTILINE)
    return list(zip(pieces[1::2], pieces[2::2], strict=True))


# ---- Text that Metal accepts

EXP_OF_STRIDED = """
    uint elem = thread_position_in_grid.x;
    auto place = elem_to_loc(elem, x_shape, x_strides, x_ndim);
    T value = x[place];
    out[elem] = metal::exp(value);
"""
SUM_OF_LANES = """
    uint i = thread_position_in_grid.x;
    float total = simd_sum(static_cast<float>(x[i]));
    if (thread_index_in_simdgroup == 0) {
        out[i / threads_per_simdgroup] = T(total);
    }
"""
ATOMIC_SUM = """
    uint i = thread_position_in_grid.x;
    atomic_fetch_add_explicit(&out[i % 4], x[i], memory_order_relaxed);
"""
TILE = """
struct Rows {
  const device float* source;
  uint stride;

  Rows(const device float* rows, uint row_stride) thread
      : source(rows), stride(row_stride) {}

  float4 at(uint row) const thread {
    return *reinterpret_cast<const device float4*>(source + row * stride);
  }
};

enum : uint { ROWS = 8, PAD = 4 };

template <int D>
METAL_FUNC void stage(threadgroup float* tile_tg, thread const Rows& rows, uint lane) {
  for (uint row = lane; row < ROWS; row += 32) {
    float4 part = rows.at(min(row, ROWS - 1));
    tile_tg[row * (D + PAD)] = part.x + max(part, 0.0f).y;
    thread float& first = reinterpret_cast<thread float*>(&part)[0];
    first = as_type<float>(as_type<uint>(first));
  }
}
"""
MATRICES = """
    threadgroup float tile_tg[ROWS * (D + PAD)];
    stage<D>(tile_tg, Rows(weight, 4), lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile is staged
    simdgroup_float8x8 a, acc = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_load(a, tile_tg, D + PAD, 0, true);
    simdgroup_multiply_accumulate(acc, a, a, acc);
    float2 pair = float2(acc.thread_elements()[0], scale) * 2.0f;
    vec<T, 2> both = vec<T, 2>(T(pair.x), T(pair.y));
    T total = 0;
    total += both[0] * x[lane];
    total = max(total, T(1.0h)) + T(precise::exp2(float(both.y)));
    out[lane] = x_shape[0] > 3 ? simd_shuffle_xor(total, 1) : T(fast::log(pair.x));
"""
DTYPES = {"float": mx.float32, "half": mx.float16, "bfloat16_t": mx.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("source", "options"),
    [
        pytest.param(EXP_OF_STRIDED, {"ensure_row_contiguous": False}, id="exp"),
        pytest.param(SUM_OF_LANES, {}, id="simd_sum"),
    ],
)
def test_kernels_in_the_style_of_the_mlx_documentation_give_no_finding(
    source, options, dtype
):
    text = generated_text(source, {"x": mx.zeros((2, 32), dtype)}, **options)
    assert check_text(text, name="example") == []


@pytest.mark.parametrize("dtype", [mx.float32, mx.int32, mx.uint32], ids=str)
def test_atomic_outputs_give_no_finding(dtype):
    inputs = {"x": mx.zeros(64, dtype)}
    text = generated_text(ATOMIC_SUM, inputs, atomic_outputs=True)
    assert "atomic<" in text
    assert check_text(text, name="example") == []


@pytest.mark.parametrize("element", DTYPES)
def test_structs_tiles_vectors_and_matrices_give_no_finding(element):
    text = kernel_text(MATRICES, header=TILE, element=element)
    assert check_text(text, name="example") == []


LEGAL = """
== recursion of templates that a specialization ends
template <int N>
float power(float x) {
  return x * power<N - 1>(x);
}
template <>
float power<0>(float x) { return 1.0f; }

== recursion of templates that its arguments end
template <int N>
float power(float x) {
  return N == 0 ? 1.0f : x * power<(N > 0 ? N - 1 : 0)>(x);
}
float cube(float x) { return power<3>(x); }

== recursion of templates that if constexpr ends
template <int N>
struct Int {};
template <int N>
float power(float x, Int<N>) {
  if constexpr (N > 0) return x * power(x, Int<N - 1>{});
  return 1.0f;
}

== call of an overload
float sum(float x) { return x; }
float sum(float2 v) { return sum(v.x) + sum(v.y); }

== call of an overload in a template
template <typename T>
T sum(T x) {
  return x;
}
template <typename T>
T sum(vec<T, 2> v) {
  return sum(v.x) + sum(v.y);
}

== constants
constant float TABLE[2] = {0.5f, 0x1p-3f};
struct Fixed {
  static constexpr constant int width = 8;
};

== parameter with a name that OpenCL reserves
float first(device float* local) { return local[0]; }

== alias of a pointer
using Row = device float*;
void advance(Row row);

== reference to a pointer
void advance(device float*& p) { p += 1; }

== vector type that is deduced
template <typename T>
float sum(vec<T, 2> v) {
  return float(v.x + v.y);
}
float of_halves() { return sum(half2(1.0h, 2.0h)); }

== vector type under another name
template <typename T>
struct Tile {
  using Pair = vec<T, 2>;
  static Pair zero() { return Pair(T(0), T(0)); }
};
float2 sum() { return Tile<float>::zero() + Tile<float>::Pair(1.0f, 2.0f); }
metal::half2 ones() { return metal::half2(1.0h, 1.0h); }

== auto that takes its address space along
template <typename T>
void swap(device T* p) {
  auto& first = p[0];
  auto* second = p + 1;
  T kept = first;
  first = *second;
  *second = kept;
}

== reference to a temporary object
float scaled(const thread float& x) { return x; }
float half_of(float x) { return scaled(x * 0.5f); }
float of_integers(int x, const device int* p) { return scaled(x) + scaled(p[0]); }
template <typename T>
T copied(const thread T& x) {
  const thread T& first = T(0);
  return x + first;
}
float copy_of(float x) { return copied(x + 1.0f); }

== methods and operators of temporary objects
struct Weight {
  float value;
  Weight(float v) thread : value(v) {}
  Weight operator+(Weight other) const thread { return Weight(value + other.value); }
  float twice() const thread { return value + value; }
};
float sum() { return (Weight(1.0f) + Weight(2.0f)).value + Weight(1.0f).twice(); }

== struct copied out of device and constant memory
struct Sizes {
  int rows, columns;
};
int count(const device Sizes* a, const constant Sizes& b) {
  Sizes first = a[0], second = b;
  return first.rows * second.columns;
}

== complex numbers in device memory
void accumulate(device complex64_t* out, complex64_t x) {
  complex64_t product = out[0] * x + 1.0f;
  out[0] += product;
  out[1] = product / x;
}

== words in comments
// 1.0, goto, std::max, new
/* double
   virtual */

== deleted constructor
struct Only {
  Only(int n) thread;
  Only() = delete;
};

== literal of bfloat
bfloat16_t one() { return 1.0bf; }

== integer that becomes a bfloat
bfloat16_t zero() { return 0; }
"""


@pytest.mark.parametrize(
    "header",
    [pytest.param(text, id=title.replace(" ", "-")) for title, text in titled(LEGAL)],
)
def test_rare_but_legal_declarations_give_no_finding(header):
    assert check_text(kernel_text("", header=header), name="example") == []


# ---- Kernels of MLX itself

HEADERS = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"
PREAMBLE = {"bf16.h", "bf16_math.h", "complex.h", "defines.h", "logging.h", "utils.h"}


def mlx_text(path, seen=None):
    """A header of MLX with its includes in place, as MLX's build puts them."""
    seen = {HEADERS / name for name in PREAMBLE} if seen is None else seen
    if path in seen:
        return ""
    seen.add(path)
    lines = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
        if include := re.match(r'#include "mlx/backend/metal/kernels/(.*)"', line):
            lines.append(mlx_text(HEADERS / include[1], seen))
            line = f'#line {number + 1} "{path.name}"'
        lines.append("" if "#pragma once" in line else line)
    return "\n".join(lines).replace("\u00a9", "(c)")


STEEL = "steel/attn/kernels/steel_attention.h"


@pytest.mark.skipif(not HEADERS.is_dir(), reason="this MLX ships no Metal headers")
@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize(
    ("header", "instance"),
    [
        pytest.param(STEEL, "attention<T, 32, 16, 64, 64, 4, 1, T, float>", id="steel"),
        pytest.param(STEEL, "attention<T, 32, 16, 64, 64, 4, 1, bool>", id="bool-mask"),
        pytest.param("sdpa_vector.h", "sdpa_vector<T, 64>", id="sdpa-vector"),
        pytest.param("sdpa_vector.h", "sdpa_vector_2pass_1<T, 64>", id="two-passes"),
        pytest.param("softmax.h", "softmax_looped<T, T>", id="softmax"),
    ],
)
def test_mlx_kernels_give_no_finding(header, instance, element):
    last = instantiation(re.sub(r"\bT\b", element, instance))
    text = "\n".join([mlx_text(HEADERS / header), last])
    findings = check_text(text, name="mlx")
    # MLX writes 0.0 for a float here and there; Metal only warns.
    assert [f for f in findings if f.rule != "double-literal"] == []


# ---- Planted mistakes
#
# A title with the rule, the header, and the body of the kernel. "//!" marks the lines
# where that rule has to be found, and no other rule anywhere.

MISTAKES = """
== address-space: threadgroup as device
kernel:
  threadgroup float t[4];
  device float* p = t;  //!

== address-space: device as threadgroup
kernel:
  threadgroup const float* p = weight;  //!

== address-space: constant as device
kernel:
  const device int* p = x_shape;  //!

== address-space: thread as device
kernel:
  float v = 1.0f;
  device float* p = &v;  //!

== address-space: threadgroup argument for device
METAL_FUNC float load(const device float* p) { return p[0]; }
kernel:
  threadgroup float t[4];
  out[0] = T(load(t));  //!

== address-space: small input for device
METAL_FUNC float load(const device float* p) { return p[0]; }
kernel:
  out[0] = T(load(&scale));  //!

== address-space: threadgroup for thread reference
kernel:
  threadgroup float t[4];
  thread float& v = t[0];  //!

== address-space: method of an object in another space
struct Row {
  float first;
  float twice() const thread { return first + first; }
};
kernel:
  threadgroup Row rows[4];
  out[0] = T(rows[0].twice());  //!

== address-space: wrong space in a deduced reference
template <typename T>
T copied(const thread T& x) { return x; }
kernel:
  threadgroup T t[4];
  out[0] = copied(t[lane]);  //!

== address-space: constant reference to another space
kernel:
  threadgroup const float* t = nullptr;
  const thread float& v = t[0];  //!

== address-space: wrong space in a template
METAL_FUNC float inner(const device float* p) { return p[0]; }
template <typename P>
float outer(P p) {
  return inner(p);  //!
}
kernel:
  threadgroup float t[4];
  out[0] = T(outer(t));

== address-space-cast: cast between spaces
kernel:
  threadgroup float t[4];
  auto p = (device float*)t;  //!

== address-space-cast: reinterpret between spaces
kernel:
  threadgroup float t[4];
  auto p = reinterpret_cast<device uint*>(t);  //!

== no-address-space: pointer parameter
float load(const float* p) { return p[0]; }  //!

== no-address-space: reference parameter
float twice(const float& v) { return v + v; }  //!

== no-address-space: reference in a template
template <typename T>
void clear(T& v) { v = T(0); }  //!

== no-address-space: pointer variable
kernel:
  const float* p = weight;  //!

== no-address-space: pointer field
struct Rows {
  float* source;  //!
};

== no-address-space: pointer result
float* next(device float* p);  //!

== no-address-space: pointer alias
using Row = float*;  //!

== no-address-space: pointer to a pointer
float first(float* device* rows);  //!

== no-address-space: cast to pointer
kernel:
  out[0] = T(*(float*)weight);  //!

== vector-element: bound to a reference
kernel:
  float4 v = 0.0f;
  thread float& first = v.x;  //!

== implicit-bfloat: float variable to bfloat (bfloat16_t)
kernel:
  T v = scale;  //!

== implicit-bfloat: float literal to bfloat (bfloat16_t)
kernel:
  T v = 0.0f;  //!

== implicit-bfloat: float stored to bfloat (bfloat16_t)
kernel:
  float v = scale;
  out[lane] = v;  //!

== implicit-bfloat: product with float to bfloat (bfloat16_t)
kernel:
  out[lane] = x[lane] * scale;  //!

== implicit-bfloat: float added to bfloat (bfloat16_t)
kernel:
  out[lane] += scale;  //!

== implicit-bfloat: float argument for bfloat (bfloat16_t)
bfloat16_t twice(bfloat16_t v) { return v + v; }
kernel:
  out[0] = twice(scale);  //!

== implicit-bfloat: float returned as bfloat (bfloat16_t)
template <typename T>
T store(float v) {
  return v;  //!
}
kernel:
  out[0] = store<T>(scale);

== implicit-bfloat: float in braces to bfloat (bfloat16_t)
kernel:
  T v[2] = {T(1.0f), scale};  //!

== implicit-bfloat: float to bfloat element (bfloat16_t)
kernel:
  vec<T, 4> v;
  v.y = scale;  //!

== implicit-bfloat: half to bfloat (bfloat16_t)
kernel:
  half v = 1.0h;
  out[0] = v;  //!

== implicit-half: bfloat to half (bfloat16_t)
kernel:
  half v = x[lane];  //!

== double: result
double wide(float v);  //!

== double-literal: plain
kernel:
  float v = scale * 0.5;  //!

== double-literal: with exponent
kernel:
  float v = scale * 1e-3;  //!

== double-literal: hexadecimal
kernel:
  float v = scale * 0x1p-3;  //!

== threadgroup-scope: array in a function
void stage() {
  threadgroup float t[4];  //!
  t[0] = 1.0f;
}

== threadgroup-scope: array at program scope
threadgroup float t[4];  //!

== threadgroup-scope: array in a struct
struct Tile {
  threadgroup float t[4];  //!
};

== threadgroup-memory: two arrays that are too large
kernel:
  threadgroup T k_tg[1024 * D];
  threadgroup T v_tg[4];  //!

== threadgroup-memory: one array in a block
kernel:
  threadgroup T k_tg[1024 * D];
  if (lane < 32) {
    threadgroup T v_tg[4];  //!
    v_tg[lane % 4] = k_tg[lane];
  }

== static-variable: in a kernel
kernel:
  static int calls;  //!

== static-variable: of one thread
thread_local constant int calls = 0;  //!

== global-variable: mutable
float total = 0.0f;  //!

== global-variable: constexpr without constant
constexpr int WIDTH = 8;  //!

== recursion: of one function
float power(float x, int n) {
  return n == 0 ? 1.0f : x * power(x, n - 1);  //!
}

== recursion: through a second function
int odd(int n);
int even(int n) {
  return n == 0 ? 1 : odd(n - 1);  //!
}
int odd(int n) {
  return n == 0 ? 0 : even(n - 1);  //!
}

== recursion: in a template
template <typename T>
T power(T x, int n) {
  return n == 0 ? T(1) : x * power(x, n - 1);  //!
}

== function-pointer: parameter
float apply(float (*f)(float), float x);  //!

== virtual: method
struct Op {
  virtual float apply(float x);  //!
};

== exception: thrown
kernel:
  if (lane > 31) throw 1;  //!

== exception: caught
kernel:
  try {  //!
    out[0] = T(0);
  } catch (...) {  //!
  }

== rtti: dynamic cast
kernel:
  auto v = dynamic_cast<int>(lane);  //!

== rtti: typeid
kernel:
  bool same = typeid(lane) == typeid(scale);  //!

== new-delete: array from the heap
kernel:
  auto p = new float[4];  //!

== new-delete: array back to the heap
kernel:
  delete[] weight;  //!

== goto: jump
kernel:
  if (lane > 8) goto done;  //!
  done:
  return;

== lambda: in a variable
kernel:
  auto twice = [](float v) { return v + v; };  //!

== std-name: standard library
kernel:
  float v = std::max(scale, 1.0f);  //!

== include: a standard header
#include <cmath>  //!

== include: an mlx header
#include "mlx/backend/metal/kernels/atomic.h"  //!

== non-ascii: in a comment
// alpha: \u03b1  //!

== unknown-name: misspelt function
kernel:
  float v = fast::exp3(scale);  //!

== unknown-name: misspelt type
kernel:
  flaot v = scale;  //!

== unknown-name: attribute not in the signature
kernel:
  uint i = threadgroup_position_in_grid.x;  //!

== compile-error: ambiguous arguments
kernel:
  float v = max(scale, 0);  //!

== compile-error: vector of too few values
kernel:
  float4 v = float4(scale, 1.0f, 2.0f);  //!

== compile-error: vector of an element type with too many values
kernel:
  vec<T, 2> v = vec<T, 2>(T(0), T(0), T(0));  //!

== compile-error: vector of another name with too many values
kernel:
  using Pair = vec<T, 2>;
  Pair v = Pair(T(0), T(0), T(0));  //!

== compile-error: matrix of another element type
kernel:
  simdgroup_half8x8 m;
  simdgroup_load(m, weight, 8);  //!

== compile-error: write to an input
kernel:
  weight[0] = 1.0f;  //!
"""


def mistakes():
    cases = []
    for title, text in titled(MISTAKES):
        rule, name, element = re.match(r"(.*?): (.*?)(?: \((\w+)\))?$", title).groups()
        header, _, body = text.partition("kernel:\n")
        text = kernel_text(body, header=header, element=element or "float")
        cases.append(pytest.param(rule, text, id=f"{rule}-{name}".replace(" ", "-")))
    return cases


@pytest.mark.parametrize(("rule", "text"), mistakes())
def test_planted_mistake_is_found_in_its_line_and_nothing_else(rule, text):
    lines = [number for number, row in enumerate(text.split("\n"), 1) if "//!" in row]
    findings = check_text(text, name="example")
    assert places(findings) == [(line, rule) for line in lines] != []
    assert all("; " in finding.message for finding in findings)  # what; what instead


@pytest.mark.parametrize("element", ["float", "half"])
def test_conversion_is_a_mistake_only_where_the_element_is_bfloat(element):
    text = kernel_text("out[lane] = scale;", element=element)
    assert check_text(text, name="example") == []


@pytest.mark.parametrize(("width", "fits"), [(64, True), (65, False)])
def test_threadgroup_memory_is_counted_per_instance(width, fits):
    body = "threadgroup T k_tg[64 * D], v_tg[64 * D];\nk_tg[lane] = v_tg[lane];"
    findings = check_text(kernel_text(body, width=width), name="example")
    assert [f.rule for f in findings] == ([] if fits else ["threadgroup-memory"])


@pytest.mark.parametrize(("number", "rules"), [(30, []), (31, ["buffer-limit"])])
def test_buffers_are_numbered_0_to_30(number, rules):
    text = kernel_text("").replace("out [[buffer(4)]]", f"out [[buffer({number})]]")
    assert [finding.rule for finding in check_text(text, name="example")] == rules


def test_signature_that_mlx_cuts_is_found_at_the_cut():
    inputs = {"x": mx.zeros((4, 8))}
    source = "out[0] = x[x_shape[0]];"
    text = generated_text(source, inputs, output_names=("out", "lse"))
    (cut,) = (n for n, row in enumerate(text.split("\n"), 1) if "out [[buffer" in row)
    assert places(check_text(text, name="example")) == [(cut, "no-attribute")]


def test_all_mistakes_of_a_text_are_found_in_its_order():
    body = "double wide;\nfloat v = missing;\nout[0] = x[0] * 1.0;"
    findings = check_text(kernel_text(body), name="example")
    first = SIGNATURE.count("\n") + 1
    assert places(findings) == [
        (first, "double"),
        (first + 1, "unknown-name"),
        (first + 2, "double-literal"),
    ]


# ---- Files, lines and messages

LINES = """#line 41 "tile.h"
float load(const float* p);
float twice(float v);
#line 7 "mask.h"
float half_of(float v) { return v * 0.5; }
"""


def test_line_directives_name_the_file_and_the_line():
    findings = check_text(kernel_text("", header=LINES), name="example")
    assert [(f.file, f.line, f.rule) for f in findings] == [
        ("tile.h", 41, "no-address-space"),
        ("mask.h", 7, "double-literal"),
    ]


def test_text_after_a_directive_without_a_file_stays_in_the_file():
    text = '#line 5 "tile.h"\n#line 90\nfloat* p(int n);\n'
    (finding,) = check_text(kernel_text("", header=text), name="example")
    assert (finding.file, finding.line) == ("tile.h", 90)


def test_declaration_right_after_a_directive_is_read_as_one():
    body = '#line 6 "body.h"\nthreadgroup float t[4];\nt[lane % 4] = scale;'
    assert check_text(kernel_text(body), name="example") == []


def test_text_without_directives_is_in_the_named_kernel():
    (finding,) = check_text("float v = 0.5f;\n", name="example")
    assert (finding.file, finding.line) == ("example", 1)


def test_mistake_in_an_instantiation_is_in_the_line_of_the_template():
    header = '#line 3 "store.h"\ntemplate <class T>\nT store(float v) { return v; }\n'
    text = kernel_text("out[0] = store<T>(scale);", header=header, element="bfloat16_t")
    (finding,) = check_text(text, name="example")
    assert (finding.file, finding.line) == ("store.h", 4)


def test_finding_reads_as_file_line_rule_and_advice():
    text = kernel_text("", header='#line 9 "tile.h"\nfloat v(float a = 0.5);\n')
    (finding,) = check_text(text, name="example")
    assert str(finding) == "tile.h:9: double-literal: 0.5 is a double; write 0.5f"


def test_messages_speak_of_metal_and_not_of_opencl():
    body = (
        "threadgroup float t[4];\ndevice float* p = t;\nT v = scale;\nfloat* q = p;\n"
        "generic(v);"
    )
    findings = check_text(kernel_text(body, element="bfloat16_t"), name="example")
    assert len(findings) == 4
    for finding in findings:
        assert not re.search(r"__|_strict|OpenCL|identifier_", finding.message)
    assert "'device float *' with an lvalue of type 'threadgroup" in findings[0].message
    assert "'generic'" in findings[3].message


def test_missing_libclang_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "clang.cindex", None)
    with pytest.raises(ImportError, match="pip install libclang"):
        check_text("", name="example")
