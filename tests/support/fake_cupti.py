"""A CUPTI of some forty lines of C, with records that the test makes: for machines without one."""

from __future__ import annotations

import ctypes
import subprocess

RECORDS_A_BUFFER = 3
REFUSED = 39
LAUNCH, LAUNCH_PTSZ, MALLOC = 311, 312, 20
RUNTIME, OVERHEAD = 5, 17

_SOURCE = r"""
#include <stdint.h>
#include <stddef.h>
#include <string.h>
typedef struct { uint32_t kind, cbid; uint64_t start, end; uint32_t pid, tid, corr, ret; } Record;
typedef void (*Request)(uint8_t **, size_t *, size_t *);
typedef void (*Complete)(void *, uint32_t, uint8_t *, size_t, size_t);
static Request request; static Complete complete;
static uint8_t *buffer; static size_t size, used; static int enabled, refusal, disabled;
static void give_back(void) {
  if (buffer) complete(NULL, 0, buffer, size, used);
  buffer = NULL; used = 0;
}
int cuptiActivityRegisterCallbacks(Request r, Complete c) { request = r; complete = c; return 0; }
int cuptiActivityEnable(int kind) { if (refusal) return refusal; enabled |= 1 << kind; return 0; }
int cuptiActivityDisable(int kind) { enabled &= ~(1 << kind); disabled++; return 0; }
int cuptiActivityFlushAll(uint32_t flag) { give_back(); return 0; }
int cuptiActivityGetNextRecord(uint8_t *from, size_t valid, uint8_t **record) {
  uint8_t *next = *record ? *record + sizeof(Record) : from;
  if (next + sizeof(Record) > from + valid) return 12;
  *record = next;
  return 0;
}
int cuptiGetCallbackName(int domain, uint32_t cbid, const char **name) {
  if (domain != 2) return 1;
  *name = cbid == 311 ? "cudaGraphLaunch_v10000" : cbid == 312 ? "cudaGraphLaunch_ptsz_v10000"
        : "cudaMalloc_v3020";
  return 0;
}
int cuptiGetResultString(int code, const char **words) { *words = "NO_SECOND_ONE"; return 0; }
void fake_refuse(int code) { refusal = code; }
int fake_enabled(void) { return enabled; }
int fake_disabled(void) { return disabled; }
void fake_call(uint32_t kind, uint32_t cbid, uint64_t start, uint64_t end, uint32_t ret) {
  if (!enabled) return;
  if (!buffer) { size_t most; request(&buffer, &size, &most); memset(buffer, 0xff, 160); }
  Record record = { kind, cbid, start, end, 0, 0, 0, ret };
  memcpy(buffer + used, &record, sizeof record);
  used += sizeof record;
  if (used == 3 * sizeof record) give_back();
}
"""


def build(folder, source=_SOURCE):
    """Compiles it into the folder and returns its path."""
    path = folder / "libcupti.so.13"
    (folder / "cupti.c").write_text(source)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(path), str(folder / "cupti.c")], check=True, timeout=60
    )
    return str(path)


class FakeCalls:
    """Makes records in a loaded stand-in, and says what it is doing."""

    def __init__(self, path):
        self._library = ctypes.CDLL(path)
        self._library.fake_call.argtypes = (
            *(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32),
        )

    def call(self, callback_id, begin_ns, end_ns, *, returned=0, kind=RUNTIME):
        self._library.fake_call(kind, callback_id, begin_ns, end_ns, returned)

    def refuse(self, code=REFUSED):
        self._library.fake_refuse(code)

    @property
    def enabled(self):
        return self._library.fake_enabled()

    @property
    def times_disabled(self):
        return self._library.fake_disabled()
