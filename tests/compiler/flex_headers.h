// Headers that FlexAttention's C++ includes besides Inductor's own, by torch 2.13; an older torch may lack some.
#if __has_include(<ATen/native/CPUBlas.h>)
#include <ATen/native/CPUBlas.h>
#endif
#if __has_include(<ATen/native/cpu/utils.h>)
#include <ATen/native/cpu/utils.h>
#endif
#if __has_include(<ATen/Context.h>)
#include <ATen/Context.h>
#endif
#if __has_include(<c10/util/Unroll.h>)
#include <c10/util/Unroll.h>
#endif
#if __has_include(<torch/csrc/inductor/aoti_torch/c/shim.h>)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#endif
#if __has_include(<Python.h>)
#include <Python.h>
#endif
