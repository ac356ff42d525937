"""Makes small files that try to do harm, each named after what it tries: python tests/hostile/make.py FOLDER

Everything is made of bytes on purpose, not by attacking libraries, and comes out the same each time. CASES says of each
file which words its error must hold. The commands in the pickles would leave a file CANARY in the working directory."""

import io
import json
import os
import struct
import sys
import zipfile
import zlib
from pathlib import Path

CANARY = "shardsmith-canary"
COMMAND = f"touch {CANARY}"
CASES = {}  # file or folder -> words that the error of each verb must hold


def case(name, *words):
    """Registers a function that makes `name`: it returns a file's bytes, or {name: bytes} of a folder."""

    def register(make):
        CASES[name] = (make, words)
        return make

    return register


# --- pickles, operation by operation ---------------------------------------------------------------------------------

PROTO, STOP, MARK, REDUCE, BUILD, TUPLE, PERSID, NEWOBJ = b"\x80\x02", b".", b"(", b"R", b"b", b"t", b"Q", b"\x81"
SETITEM, EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE, NONE, APPEND = b"s", b"}", b"]", b")", b"N", b"a"


def name(module, attribute):
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value):
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(values):
    return MARK + b"".join(number(n) for n in values) + TUPLE


def call(function, *arguments):
    return function + MARK + b"".join(arguments) + TUPLE + REDUCE


def storage(elements, key="0", cls="FloatStorage", module="torch"):
    return MARK + text("storage") + name(module, cls) + text(key) + text("cpu") + number(elements) + TUPLE + PERSID


def tensor(size, stride, elements, offset=0, **options):
    hooks = name("collections", "OrderedDict") + EMPTY_TUPLE + REDUCE
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    return call(rebuild, storage(elements, **options), number(offset), numbers(size), numbers(stride), b"\x89", hooks)


def state(value, key="w"):
    return EMPTY_DICT + text(key) + value + SETITEM


# --- torch's archive -------------------------------------------------------------------------------------------------


def archive(*records, compression=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for record, content in records:
            file.writestr(zipfile.ZipInfo(f"archive/{record}", (1980, 1, 1, 0, 0, 0)), content, compression)
    return out.getvalue()


def torch_file(content, *records):
    return archive(("data.pkl", PROTO + content + STOP), ("byteorder", b"little"), *records, ("version", b"3\n"))


def tensor_file(data=b"\0" * 24, size=(2, 3), stride=(3, 1), elements=6, **options):
    return torch_file(state(tensor(size, stride, elements, **options)), ("data/0", data))


def pickle_case(file, content, *words):
    CASES[file] = (lambda: torch_file(content), words)


system = call(name("posix", "system"), text(COMMAND))
pickle_case("pickle-os-system.pt", system, "posix.system")
pickle_case("pickle-os-system-alone.pt", name("os", "system"), "os.system")
pickle_case("pickle-reduce-eval.pt", call(name("builtins", "eval"), text(f"open('{CANARY}', 'w')")), "builtins.eval")
pickle_case("pickle-reduce-exec-python-2.pt", call(name("__builtin__", "execfile"), text("x")), "__builtin__.execfile")
pickle_case("pickle-subprocess.pt", call(name("subprocess", "Popen"), text(COMMAND)), "subprocess.Popen")
pickle_case("pickle-nested-reduce.pt", state(call(name("collections", "OrderedDict"), system)), "posix.system")
pickle_case("pickle-deep-in-arguments.pt", state(EMPTY_LIST + MARK + NONE + system + b"e"), "posix.system")
pickle_case("pickle-build-on-foreign-class.pt", name("argparse", "Namespace") + EMPTY_TUPLE + NEWOBJ + EMPTY_DICT + BUILD, "argparse.Namespace")
pickle_case("pickle-build-on-a-class.pt", name("torch", "Size") + state(number(1), "__reduce__") + BUILD, "state")
pickle_case("pickle-build-setstate.pt", name("torch", "FloatTensor") + EMPTY_TUPLE + REDUCE + state(name("os", "system"), "__setstate__") + BUILD, "os.system")
pickle_case("pickle-stack-global-trick.pt", text("os") + b"q\x00" + text("system") + b"q\x010" + b"0" + b"h\x00h\x01\x93" + MARK + text(COMMAND) + TUPLE + REDUCE, "os.system")
pickle_case("pickle-stack-global-unicode.pt", b"\x8c\x05posix\x8c\x06system\x93" + MARK + text(COMMAND) + TUPLE + REDUCE, "posix.system")
pickle_case("pickle-stack-global-of-numbers.pt", number(1) + number(2) + b"\x93", "global")
pickle_case("pickle-dotted-name.pt", call(name("torch.serialization", "os.system"), text(COMMAND)), "torch.serialization.os.system")
pickle_case("pickle-allowed-prefix.pt", call(name("torch._utils", "_rebuild_tensor_v2.__globals__"), NONE), "_rebuild_tensor_v2.__globals__")
pickle_case("pickle-name-with-line-break.pt", text("os\nsystem") + text("system") + b"\x93", "os?system.system")
pickle_case("pickle-getattr-chain.pt", call(name("builtins", "getattr"), name("builtins", "list"), text("__class__")), "builtins.getattr")
pickle_case("pickle-import.pt", call(name("builtins", "__import__"), text("os")), "builtins.__import__")
pickle_case("pickle-ext-code.pt", b"\x82\x01" + MARK + text(COMMAND) + TUPLE + REDUCE, "0x82")
pickle_case("pickle-ext-code-4.pt", b"\x84\x01\x00\x00\x00", "0x84")
pickle_case("pickle-inst-opcode.pt", MARK + text(COMMAND) + b"ios\nsystem\n", "os.system")
pickle_case("pickle-obj-opcode.pt", MARK + name("os", "system") + text(COMMAND) + b"o", "os.system")
pickle_case("pickle-newobj-ex.pt", name("torch", "Tensor") + EMPTY_TUPLE + EMPTY_DICT + b"\x92", "0x92")
pickle_case("pickle-newobj-on-a-function.pt", name("posix", "system") + MARK + text(COMMAND) + TUPLE + NEWOBJ, "posix.system")
pickle_case("pickle-reduce-of-a-text.pt", call(text("os.system"), text(COMMAND)), "forbidden")
pickle_case("pickle-torch-load.pt", call(name("torch", "load"), text("x")), "torch.load")
pickle_case("pickle-load-from-bytes.pt", call(name("torch.storage", "_load_from_bytes"), text("x")), "torch.storage._load_from_bytes")
pickle_case("pickle-torch-hub.pt", call(name("torch.hub", "load"), text("x")), "torch.hub.load")
pickle_case("pickle-numpy-load.pt", call(name("numpy", "load"), text("x")), "numpy.load")
pickle_case("pickle-subclass-function.pt", call(name("torch._tensor", "_rebuild_from_type_v2"), name("os", "system"), name("torch", "Tensor"), EMPTY_TUPLE, NONE), "os.system")
pickle_case("pickle-storage-of-a-function.pt", state(tensor((1,), (1,), 1, cls="system", module="posix")), "posix.system")
pickle_case("pickle-persistent-function.pt", MARK + text("module") + name("os", "system") + NONE + NONE + TUPLE + PERSID, "os.system")
pickle_case("pickle-persistent-text.pt", text(COMMAND) + PERSID, "persistent")
pickle_case("pickle-codecs-rot13.pt", call(name("_codecs", "encode"), text("x"), text("rot13")), "latin1")
pickle_case("pickle-memo-index.pt", b"j\xff\xff\xff\xff", "4294967295")
pickle_case("pickle-deep-nesting.pt", EMPTY_LIST * 100_000 + APPEND * 99_999, "nested")
pickle_case("pickle-self-reference.pt", EMPTY_LIST + b"q\x00h\x00" + APPEND, "nested")
pickle_case("pickle-billion-laughs.pt", EMPTY_LIST + b"".join(b"q" + bytes([i]) + EMPTY_LIST + MARK + (b"h" + bytes([i])) * 10 + b"e" for i in range(60)), "multiply")
pickle_case("pickle-text-laughs.pt", text("x" * 10_000) + b"q\x00" + EMPTY_LIST + MARK + b"h\x00" * 10_000 + b"e" + b"q\x01" + EMPTY_LIST + MARK + b"h\x01" * 10_000 + b"e", "multiply")
pickle_case("pickle-set-again-and-again.pt", EMPTY_LIST + MARK + NONE * 200_000 + b"e" + b"q\x00" + state(tensor((1,), (1,), 1))[:-1] + (MARK + b"h\x00" + NONE * 3 + TUPLE + BUILD) * 40_000 + SETITEM)
pickle_case("pickle-huge-text.pt", b"\x8d" + struct.pack("<Q", 1 << 62) + b"x", "truncated")
pickle_case("pickle-huge-integer.pt", b"\x8b\xff\xff\xff\x7f", "truncated")
pickle_case("pickle-long-integer.pt", b"\x8b" + struct.pack("<I", 100_000) + b"\x01" * 100_000, "integer")
pickle_case("pickle-append-to-a-dict.pt", EMPTY_DICT + NONE + APPEND, "no list")
pickle_case("pickle-item-of-a-list.pt", EMPTY_LIST + NONE + NONE + SETITEM, "no dict")
pickle_case("pickle-empty-stack.pt", REDUCE, "stack")
pickle_case("pickle-mark-without-end.pt", MARK + NONE + b"1" + TUPLE, "mark")
pickle_case("pickle-key-twice.pt", EMPTY_DICT + (text("w") + NONE + SETITEM) * 2, "twice")
pickle_case("pickle-protocol-9.pt", b"\x80\x09" + NONE, "protocol 9")
pickle_case("pickle-text-protocol.pt", b"cos\nsystem\n(S'" + COMMAND.encode() + b"'\ntR", "os.system")


@case("pickle-truncated.pt", "truncated")
def _():
    return archive(("data.pkl", PROTO + EMPTY_DICT), ("version", b"3\n"))


def legacy(content, keys=EMPTY_LIST, tail=b""):
    magic = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
    about = EMPTY_DICT + text("little_endian") + b"\x88" + SETITEM
    parts = [b"\x8a\x0a" + magic, b"M\xe9\x03", about, content, keys]
    return b"".join(PROTO + part + STOP for part in parts) + tail


def legacy_storage(elements, view=NONE):
    return MARK + text("storage") + name("torch", "FloatStorage") + text("7") + text("cpu") + number(elements) + view + TUPLE + PERSID


def legacy_tensor(elements, view=NONE):
    return state(call(name("torch._utils", "_rebuild_tensor"), legacy_storage(elements, view), number(0), numbers([2]), numbers([1])))


KEY = EMPTY_LIST + text("7") + APPEND
CASES["legacy-os-system.pt"] = (lambda: legacy(system), ("posix.system",))
CASES["legacy-storage-too-short.pt"] = (lambda: legacy(legacy_tensor(2), KEY, struct.pack("<q", 2) + b"\0" * 7), ("truncated",))
CASES["legacy-count-overflow.pt"] = (lambda: legacy(legacy_tensor(2), KEY, struct.pack("<Q", 1 << 62) + b"\0" * 8), ("elements",))
CASES["legacy-storage-missing.pt"] = (lambda: legacy(legacy_tensor(2)), ("missing",))
CASES["legacy-view-past-end.pt"] = (lambda: legacy(legacy_tensor(2, MARK + text("v") + number(1) + number(2) + TUPLE), KEY, struct.pack("<q", 2) + b"\0" * 8), ("leaves",))
CASES["legacy-key-twice.pt"] = (lambda: legacy(legacy_tensor(2), KEY + text("7") + APPEND, struct.pack("<q", 2) + b"\0" * 8 + struct.pack("<q", 2) + b"\0" * 8), ("twice",))


@case("tar-of-2016.pt", "tar")
def _():
    header = bytearray(512)
    header[:8], header[257:262] = b"sys_info", b"ustar"
    return bytes(header) + bytes(1024)


@case("preview-format.pt", "preview")
def _():
    return b"PYTORCH1" + bytes(64)


@case("torchscript.pt", "TorchScript")
def _():
    return archive(("data.pkl", PROTO + EMPTY_DICT + STOP), ("constants.pkl", PROTO + EMPTY_TUPLE + STOP), ("code/x.py", b"x"), ("version", b"3\n"))


# --- tensors that lie about themselves -------------------------------------------------------------------------------

CASES["storage-too-short.pt"] = (lambda: tensor_file(data=b"\0" * 23), ("data/0",))
CASES["storage-missing.pt"] = (lambda: torch_file(state(tensor((1,), (1,), 1))), ("data/0", "missing"))
CASES["storage-key-dotdot.pt"] = (lambda: torch_file(state(tensor((1,), (1,), 1, key="../../../../etc/passwd"))), ("etc/passwd", "missing"))
CASES["storage-size-overflow.pt"] = (lambda: tensor_file(elements=1 << 62), ("elements",))
CASES["storage-size-negative.pt"] = (lambda: tensor_file(elements=-6), ("elements",))
CASES["view-past-end.pt"] = (lambda: tensor_file(offset=1), ("leaves",))
CASES["stride-overflow.pt"] = (lambda: tensor_file(stride=((1 << 63) - 1, 1)), ("leaves",))
CASES["stride-negative.pt"] = (lambda: tensor_file(stride=(-3, 1)), ("negative",))
CASES["negative-size.pt"] = (lambda: tensor_file(size=(-2, -3)), ("negative",))
CASES["negative-offset.pt"] = (lambda: tensor_file(offset=-1), ("negative",))
CASES["shape-overflow.pt"] = (lambda: tensor_file(size=(1 << 32, 1 << 32), stride=(0, 0)), ("leaves",))
CASES["shape-beyond-64-bits.pt"] = (lambda: tensor_file(size=(1 << 64, 1), stride=(0, 0)), ("integer",))
CASES["sizes-without-strides.pt"] = (lambda: tensor_file(stride=(1,)), ("strides",))
CASES["thousand-dimensions.pt"] = (lambda: tensor_file(size=(1,) * 1000, stride=(1,) * 1000), ("dimensions",))


# --- zip archives ----------------------------------------------------------------------------------------------------


def patched(data, changes, which=0):
    """Changes fields of the central directory's entry number `which`: {offset in the entry: bytes}."""
    at = -1
    for _ in range(which + 1):
        at = data.index(b"PK\x01\x02", at + 1)
    data = bytearray(data)
    for offset, value in changes.items():
        data[at + offset : at + offset + len(value)] = value
    return bytes(data)


def good():
    return tensor_file(b"".join(struct.pack("<f", i + 1) for i in range(6)))


@case("zip-bomb.pt")
def _():  # honest 400 MiB of zeros in 400 KiB: valid, so verbs may take it, but not all at once
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    block, count = bytes(1 << 20), 400
    packed = b"".join(deflate.compress(block) for _ in range(count)) + deflate.flush()
    crc = 0
    for _ in range(count):
        crc = zlib.crc32(block, crc)
    elements = count << 18
    data = tensor_file(packed, size=(elements,), stride=(1,), elements=elements)
    sizes = struct.pack("<II", len(packed), count << 20)
    return patched(data, {10: struct.pack("<H", 8), 16: struct.pack("<I", crc), 20: sizes}, 2)


@case("zip-bomb-of-a-pickle.pt", "data.pkl")
def _():
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = b"".join(deflate.compress(b"N" * (1 << 20)) for _ in range(512)) + deflate.flush()
    data = archive(("data.pkl", packed), ("version", b"3\n"))
    return patched(data, {10: struct.pack("<H", 8), 16: bytes(4), 24: struct.pack("<I", 512 << 20)})


@case("zip-bomb-that-lies.pt", "declares")
def _():
    data = archive(("data.pkl", PROTO + NONE + STOP), ("version", b"3\n"), compression=zipfile.ZIP_DEFLATED)
    return patched(data, {24: struct.pack("<I", 0x7FFFFFFF)})


@case("zip-deflated-longer-than-declared.pt", "data.pkl")
def _():
    data = archive(("data.pkl", PROTO + NONE * 1000 + STOP), ("version", b"3\n"), compression=zipfile.ZIP_DEFLATED)
    return patched(data, {16: bytes(4), 24: struct.pack("<I", 5)})


def zip_case(file, changes, *words, which=0):
    CASES[file] = (lambda: patched(good(), changes, which), words)


@case("zip-overlapping-records.pt", "overlap")
def _():
    # data/0 holds a local header too, which the directory names as a record of its own.
    inner = archive(("data/1", bytes(24)))
    local = inner[: inner.index(b"PK\x01\x02")]
    local += bytes(-len(local) % 4)
    data = tensor_file(local, size=(2,), stride=(1,), elements=len(local) // 4)
    entry = bytearray(inner[inner.index(b"PK\x01\x02") : inner.index(b"PK\x05\x06")])
    entry[42:46] = struct.pack("<I", data.index(local))
    end = data.index(b"PK\x05\x06")
    tail = bytearray(data[end:])
    count, size = struct.unpack_from("<HI", tail, 10)
    struct.pack_into("<HHI", tail, 8, count + 1, count + 1, size + len(entry))
    return data[:end] + bytes(entry) + bytes(tail)


@case("zip-duplicate-name.pt", "twice")
def _():
    data = archive(("version", b"3\n"), ("data.pkl", PROTO + NONE + STOP), ("versioN", b"4\n"))
    return data.replace(b"archive/versioN", b"archive/version")


zip_case("zip-offset-past-end.pt", {42: struct.pack("<I", 0x7FFFFFFF)}, "outside")
zip_case("zip-size-past-end.pt", {20: struct.pack("<II", 1 << 30, 1 << 30)}, "leave the file", which=2)
zip_case("zip-encrypted.pt", {8: struct.pack("<H", 1)}, "encrypted")
zip_case("zip-unknown-method.pt", {10: struct.pack("<H", 99)}, "method 99")
zip_case("zip-other-local-name.pt", {46: b"archive/DATA.pkl"}, "another name")
zip_case("zip-name-longer-than-directory.pt", {28: struct.pack("<H", 0xFFFF)}, "cut off")
zip_case("zip-checksum-wrong.pt", {16: b"\1\2\3\4"}, "checksum")
CASES["zip-truncated.pt"] = (lambda: good()[:-30], ("cut off",))
CASES["zip-first-half.pt"] = (lambda: good()[: len(good()) // 2], ("cut off",))
CASES["zip-without-folder.pt"] = (lambda: good().replace(b"archive/", b"archive-"), ("no folder",))


@case("zip-directory-past-end.pt", "directory")
def _():
    data = bytearray(good())
    struct.pack_into("<II", data, len(data) - 22 + 12, 1 << 30, 1 << 30)
    return bytes(data)


@case("zip64-end-misplaced.pt", "zip64")
def _():
    data = good()
    locator = struct.pack("<IIQI", 0x07064B50, 0, (1 << 64) - 8, 1)
    return data[:-22] + locator + data[-22:]


@case("zip-many-empty-entries.pt", "damaged")
def _():
    data = bytearray(archive(*((f"data/{i}", b"") for i in range(2_000)), ("data.pkl", PROTO + NONE + STOP)))
    struct.pack_into("<HH", data, len(data) - 22 + 8, 2_002, 2_002)
    return bytes(data)


# --- safetensors -----------------------------------------------------------------------------------------------------


def safetensors(header, data=b"", length=None):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_case(file, words, *arguments, **options):
    CASES[f"safetensors-{file}.safetensors"] = (lambda: safetensors(*arguments, **options), words)


ONE = json.dumps(entry(0, 4, [1])).encode()
safetensors_case("header-huge", ("header",), {"w": entry(0, 4, [1])}, bytes(4), length=99_000_000)
safetensors_case("header-past-end", ("truncated",), {"w": entry(0, 4, [1])}, bytes(4), length=4000)
safetensors_case("overlap", ("overlaps",), {"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12))
safetensors_case("same-bytes-twice", ("overlaps",), {"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}, bytes(8))
safetensors_case("hole", ("hole",), {"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, bytes(12))
safetensors_case("hole-at-the-start", ("hole",), {"a": entry(4, 8, [1])}, bytes(8))
safetensors_case("bytes-behind", ("tensors take",), {"a": entry(0, 4, [1])}, bytes(8))
safetensors_case("truncated", ("truncated",), {"a": entry(0, 4, [1])}, bytes(3))
safetensors_case("shape-overflow", ("2^64",), {"a": entry(0, 0, [1 << 32, 1 << 32])})
safetensors_case("shape-of-other-size", ("needs 12",), {"a": entry(0, 4, [3])}, bytes(4))
safetensors_case("shape-negative", ("sizes",), {"a": entry(0, 4, [-1])}, bytes(4))
safetensors_case("shape-fraction", ("sizes",), {"a": entry(0, 4, [1.0])}, bytes(4))
safetensors_case("shape-beyond-64-bits", ("sizes",), {"a": entry(0, 4, [1 << 64])}, bytes(4))
safetensors_case("thousand-dimensions", ("dimensions",), {"a": entry(0, 4, [1] * 1000)}, bytes(4))
safetensors_case("offsets-reversed", ("offsets",), {"a": entry(4, 0, [1])}, bytes(4))
safetensors_case("offset-past-end", ("truncated",), {"a": entry(1 << 62, (1 << 62) + 4, [1])}, bytes(4))
safetensors_case("offset-missing", ("data_offsets",), {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, bytes(4))
safetensors_case("unknown-dtype", ("F31",), {"a": entry(0, 4, [1], "F31")}, bytes(4))
safetensors_case("duplicate-key", ("twice",), b'{"w":' + ONE + b',"w":' + ONE + b"}", bytes(4))
safetensors_case("duplicate-field", ("twice",), b'{"w":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4))
safetensors_case("metadata-number", ("__metadata__",), {"__metadata__": {"a": 1}, "w": entry(0, 4, [1])}, bytes(4))
safetensors_case("metadata-list", ("__metadata__",), {"__metadata__": ["a"], "w": entry(0, 4, [1])}, bytes(4))
safetensors_case("not-json", ("JSON",), b'{"w": ', bytes(4))
safetensors_case("not-utf-8", ("JSON",), b'{"\xff\xfe": 1}', bytes(4))
safetensors_case("deep-nesting", ("nested",), b'{"a":' * 100_000 + b"1" + b"}" * 100_000, bytes(4))
safetensors_case("entry-is-a-list", ("dtype",), {"w": []}, bytes(4))


# --- folders of Hugging Face -----------------------------------------------------------------------------------------

CONFIG = b'{"model_type": "unknown"}'
WEIGHTS = safetensors({"w": entry(0, 4, [1])}, bytes(4))


def hf_index(weight_map):
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


def hf_case(folder, weight_map, words, **files):
    content = {"config.json": CONFIG, "model.safetensors.index.json": hf_index(weight_map), "a.safetensors": WEIGHTS}
    CASES[folder] = (lambda: content | {name.replace("_", "."): data for name, data in files.items()}, words)


hf_case("hf-index-dotdot", {"w": "../outside.safetensors"}, ("../outside.safetensors",))
hf_case("hf-index-absolute", {"w": "/etc/passwd"}, ("/etc/passwd",))
hf_case("hf-index-below", {"w": "sub/a.safetensors"}, ("sub/a.safetensors",))
hf_case("hf-index-nul", {"w": "a.safetensors\0x"}, ("refused",))
hf_case("hf-index-dot", {"w": "."}, ("refused",))
hf_case("hf-index-missing-shard", {"w": "a.safetensors", "b": "b.safetensors"}, ("b.safetensors",))
hf_case("hf-index-names-a-number", {"w": 1}, ("weight map",))
hf_case("hf-index-tensor-not-there", {"w": "a.safetensors", "x": "a.safetensors"}, ("'x'",))
hf_case("hf-tensor-in-two-files", {"w": "a.safetensors", "x": "b.safetensors"}, ("two files",), b_safetensors=WEIGHTS)
hf_case("hf-index-without-map", {}, ("weight_map",), model_safetensors_index_json=b"{}")
CASES["hf-link-out"] = (lambda: {"config.json": CONFIG, "model.safetensors.index.json": hf_index({"w": "a.safetensors"}), "a.safetensors": "../outside.safetensors"}, ("link",))
CASES["hf-bin-os-system"] = (lambda: {"config.json": CONFIG, "pytorch_model.bin": torch_file(system)}, ("posix.system",))
CASES["hf-config-is-a-list"] = (lambda: {"config.json": b"[]", "model.safetensors": WEIGHTS}, ("config.json",))
CASES["hf-config-deep-nesting"] = (lambda: {"config.json": b"[" * 100_000, "model.safetensors": WEIGHTS}, ("nested",))


# --- checkpoints of ours ---------------------------------------------------------------------------------------------


def our_file(content, slices, extra=None, *records):
    """A file with our extra record, its checksums right."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        add = lambda record, data: file.writestr(zipfile.ZipInfo(f"archive/{record}", (1980, 1, 1, 0, 0, 0)), data)
        add("data.pkl", PROTO + content + STOP)
        for record, data in (*records, ("version", b"3\n")):
            add(record, data)
        covered = out.tell()
        record = json.dumps({"version": 1, "block_size": 1 << 20, "covered": covered, "slices": slices, "extra": extra or {},
                             "crc": f"{zlib.crc32(out.getvalue()[:covered]):08x}"}).encode()
        add("shardsmith", record)
    data = out.getvalue()
    return data, {"size": len(data), "digest": f"{zlib.crc32(record):08x}", "tail": f"{zlib.crc32(data[covered:]):08x}"}


def part(shape, offset, extent, tensor_name="model/w", number_of_tensor=0):
    return {"tensor": number_of_tensor, "name": tensor_name, "shape": shape, "offset": offset, "extent": extent}


def our_tensor(size, slices, extra=None):
    elements = size[0] * size[1]
    return our_file(state(tensor(size, (size[1], 1), elements)), slices, extra, ("data/0", bytes(4 * elements)))


def partial(parts, **fields):
    manifest = {"format_version": 1, "save_id": "0123456789abcdef", "tag": "a", "step": 1, "time": 1.0, "world_size": len(parts), "pp": len(parts),
                "tp": 1, "rdp": 1, "placement": "DPT", "partition": [0] * (len(parts) + 1), "model_config": None, "hf": "",
                "files": [{"name": file} | about for file, (_, about) in parts.items()]} | fields
    return {"manifest.json": json.dumps(manifest).encode()} | {file: data for file, (data, _) in parts.items()}


def halves(first, second):
    return {"model_0_0.pt": our_tensor((2, 3), [first]), "model_1_0.pt": our_tensor((2, 3), [second])}


LOW, HIGH = part([4, 3], [0, 0], [2, 3]), part([4, 3], [2, 0], [2, 3])


def partial_case(folder, words, make):
    CASES[folder] = (make, words)


partial_case("partial-slice-overlap", ("overlaps",), lambda: partial(halves(LOW, part([4, 3], [1, 0], [2, 3]))))
partial_case("partial-slice-missing", ("6 of its 12",), lambda: partial({"model_0_0.pt": our_tensor((2, 3), [LOW])}))
partial_case("partial-slice-outside", ("inside",), lambda: partial(halves(LOW, part([4, 3], [3, 0], [2, 3]))))
partial_case("partial-slice-overflow", ("inside",), lambda: partial(halves(LOW, part([4, 3], [(1 << 63) - 1, 0], [2, 3]))))
partial_case("partial-slice-larger-than-its-tensor", ("smaller",), lambda: partial(halves(LOW, part([4, 9], [2, 0], [2, 9]))))
partial_case("partial-slice-of-no-tensor", ("tensor 7",), lambda: partial(halves(LOW, HIGH | {"tensor": 7})))
partial_case("partial-other-shapes", ("model/w",), lambda: partial(halves(LOW, part([8, 3], [2, 0], [2, 3]))))
partial_case("partial-file-missing", ("model_1_0.pt",), lambda: {k: v for k, v in partial(halves(LOW, HIGH)).items() if k != "model_1_0.pt"})
partial_case("partial-file-cut", ("model_1_0.pt",), lambda: (lambda f: f | {"model_1_0.pt": f["model_1_0.pt"][:-10]})(partial(halves(LOW, HIGH))))
partial_case("partial-link-out", ("model_1_0.pt",), lambda: partial(halves(LOW, HIGH)) | {"model_1_0.pt": "../outside.pt"})
partial_case("partial-os-system", ("posix.system",), lambda: partial({"model_0_0.pt": our_file(system, [])}))
partial_case("partial-user-content-os-system", ("posix.system",), lambda: partial({"model_0_0.pt": our_tensor((4, 3), [part([4, 3], [0, 0], [4, 3])]), "user_content.pt": our_file(system, [])}, pp=1, world_size=2, rdp=2, partition=[0, 1]))


@case("partial-file-of-another-save", "another save")
def _():
    right, wrong = (our_tensor((2, 3), [HIGH], {"id": text}) for text in "ab")  # of one size
    return partial({"model_0_0.pt": our_tensor((2, 3), [LOW]), "model_1_0.pt": right}) | {"model_1_0.pt": wrong[0]}


@case("partial-block-damaged", "model_0_0.pt")  # found where the data are read
def _():
    files = partial({"model_0_0.pt": our_tensor((4, 3), [WHOLE])})
    data = files["model_0_0.pt"]
    place = data.index(bytes(48))
    return files | {"model_0_0.pt": data[:place] + b"\1" + data[place + 1 :]}


def manifest_case(folder, *words, **fields):
    CASES[folder] = (lambda: partial({"model_0_0.pt": our_tensor((4, 3), [WHOLE])}, **fields), ("manifest.json", *words))


WHOLE = part([4, 3], [0, 0], [4, 3])
ABOUT = {"size": 1, "digest": "00000000", "tail": "00000000"}
manifest_case("manifest-dotdot", "../outside.pt", files=[{"name": "../outside.pt"} | ABOUT])
manifest_case("manifest-absolute", "/etc/passwd", files=[{"name": "/etc/passwd"} | ABOUT])
manifest_case("manifest-below", "sub/x.pt", files=[{"name": "sub/x.pt"} | ABOUT])
manifest_case("manifest-line-break", "name", files=[{"name": "x\ny.pt"} | ABOUT])
manifest_case("manifest-file-twice", "once", files=[{"name": "x.pt"} | ABOUT] * 2)
manifest_case("manifest-negative-size", "size", files=[{"name": "x.pt"} | ABOUT | {"size": -1}])
manifest_case("manifest-newer", "newer", format_version=2)
manifest_case("manifest-degrees-overflow", "world size", pp=1 << 24, tp=1 << 24, rdp=1 << 24, world_size=1)
manifest_case("manifest-huge-world", "world_size", world_size=1 << 62)
manifest_case("manifest-partition-descends", "partition", partition=[0, 5, 3])
manifest_case("manifest-step-is-a-text", "step", step="1")
CASES["manifest-not-json"] = (lambda: {"manifest.json": b'{"format_version": 1'}, ("manifest.json", "JSON"))
CASES["manifest-deep-nesting"] = (lambda: {"manifest.json": b"[" * 100_000}, ("manifest.json", "nested"))
CASES["manifest-key-twice"] = (lambda: {"manifest.json": b'{"format_version": 1, "format_version": 1}'}, ("twice",))


def full(about):
    manifest = json.loads(partial({})["manifest.json"]) | {"world_size": 1, "pp": 1, "partition": [0, 1]} | about
    return our_tensor((2, 3), [part([2, 3], [0, 0], [2, 3], "w")], {"save_id": "x", "full": manifest})[0]


CASES["full-companion-dotdot.pt"] = (lambda: full({"files": [{"name": "../outside.pt"} | ABOUT]}), ("../outside.pt",))
CASES["full-companion-of-another.pt"] = (lambda: full({"files": [{"name": "optimizer_other.pt"} | ABOUT]}), ("optimizer_other.pt",))
CASES["full-companion-missing.pt"] = (lambda: full({"files": [{"name": "optimizer_full-companion-missing.pt"} | ABOUT]}), ("missing",))


def record_case(file, words, **changes):
    def make():
        data, _ = our_tensor((2, 3), [part([2, 3], [0, 0], [2, 3], "w")])
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            parts = [(name.split("/")[1] if name.count("/") == 1 else "data/0", old.read(name)) for name in old.namelist()]
        return archive(*((name, json.dumps(json.loads(content) | changes).encode() if name == "shardsmith" else content) for name, content in parts))

    CASES[file] = (make, words)


record_case("record-covers-too-much.pt", ("covers",), covered=1 << 62)
record_case("record-tiny-blocks.pt", ("block size",), block_size=1)
record_case("record-huge-blocks.pt", ("block size",), block_size=1 << 62)
record_case("record-checksum-too-many.pt", ("checksums",), crc="00000000" * 9)
record_case("record-checksum-no-number.pt", ("checksum",), crc="zzzzzzzz")
record_case("record-newer.pt", ("newer",), version=2)
record_case("record-slice-shape-overflow.pt", ("w",), slices=[part([1 << 62, 1 << 62], [0, 0], [2, 3], "w")])
record_case("record-slice-negative.pt", ("sizes",), slices=[part([2, 3], [0, -1], [2, 3], "w")])
record_case("record-slice-twice.pt", ("slice",), slices=[part([2, 3], [0, 0], [2, 3], "w")] * 2)


# --- torch.distributed.checkpoint ------------------------------------------------------------------------------------


META = "torch.distributed.checkpoint.metadata"


def instance(module, cls, fields):
    return name(module, cls) + EMPTY_TUPLE + NEWOBJ + EMPTY_DICT + b"".join(text(k) + v + SETITEM for k, v in fields.items()) + BUILD


def size(values):
    return call(name("torch", "Size"), numbers(values))


def dcp_tensor(shape, chunks):
    properties = name(META, "TensorProperties") + EMPTY_TUPLE + NEWOBJ + MARK + name("torch", "float32") + NONE + b"\x89" + NONE + b"\x89" + TUPLE + BUILD
    pieces = b"".join(instance(META, "ChunkStorageMetadata", {"offsets": size(at), "sizes": size(extent)}) + APPEND for at, extent in chunks)
    return instance(META, "TensorStorageMetadata", {"properties": properties, "size": size(shape), "chunks": EMPTY_LIST + pieces})


def dcp_place(key, at, file, offset, length):
    index = instance(META, "MetadataIndex", {"fqn": text(key), "offset": size(at), "index": NONE})
    info = {"relative_path": text(file), "offset": number(offset), "length": number(length)}
    return index + instance("torch.distributed.checkpoint.filesystem", "_StorageInfo", info) + SETITEM


def dcp(shape, chunks, places, **more):
    fields = {"state_dict_metadata": EMPTY_DICT + text("w") + dcp_tensor(shape, chunks) + SETITEM, "planner_data": NONE, "storage_data": EMPTY_DICT + b"".join(places)}
    return PROTO + instance(META, "Metadata", fields | more) + STOP


def dcp_item(rows):
    return torch_file(tensor((rows, 3), (3, 1), 3 * rows), ("data/0", bytes(12 * rows)))


ROWS = dcp_item(2)
FILE = "__0_0.distcp"
EVIL = ROWS + torch_file(tensor((2, 3), (3, 1), 6, cls="system", module="posix"), ("data/0", bytes(24)))
TOP, BOTTOM = ([0, 0], [2, 3]), ([2, 0], [2, 3])


def two(second=BOTTOM, at=None, **place):
    where = {"file": FILE, "offset": len(ROWS), "length": len(ROWS)} | place
    return [dcp_place("w", [0, 0], FILE, 0, len(ROWS)), dcp_place("w", at or second[0], **where)]


def dcp_case(folder, words, make, data=lambda: ROWS + ROWS, **files):
    CASES[folder] = (lambda: {".metadata": make(), FILE: data()}, words)


dcp_case("dcp-dotdot", ("../outside.distcp",), lambda: dcp([4, 3], [TOP, BOTTOM], two(file="../outside.distcp")))
dcp_case("dcp-absolute", ("/etc/passwd",), lambda: dcp([4, 3], [TOP, BOTTOM], two(file="/etc/passwd")))
dcp_case("dcp-link-out", ("link",), lambda: dcp([4, 3], [TOP, BOTTOM], two()), lambda: "../outside.distcp")
dcp_case("dcp-chunk-overlap", ("overlap",), lambda: dcp([3, 3], [TOP, ([1, 0], [2, 3])], two(([1, 0], [2, 3]))))
dcp_case("dcp-chunk-missing", ("6 of its 12",), lambda: dcp([4, 3], [TOP], two()[:1]))
dcp_case("dcp-chunk-without-a-place", ("storage_data",), lambda: dcp([4, 3], [TOP, BOTTOM], two()[:1]))
dcp_case("dcp-chunk-outside", ("inside",), lambda: dcp([3, 3], [TOP, BOTTOM], two()))
dcp_case("dcp-chunk-overflow", ("w",), lambda: dcp([(1 << 63) - 1, (1 << 63) - 1], [TOP], two()[:1]))
dcp_case("dcp-chunk-of-another-shape", ("shape",), lambda: dcp([5, 3], [TOP, ([2, 0], [3, 3])], two(([2, 0], [3, 3]))))
dcp_case("dcp-place-twice", ("twice",), lambda: dcp([4, 3], [TOP, BOTTOM], two(at=[0, 0])))
dcp_case("dcp-item-past-end", ("truncated",), lambda: dcp([4, 3], [TOP, BOTTOM], two(offset=1 << 40)))
dcp_case("dcp-item-overflow", ("truncated",), lambda: dcp([4, 3], [TOP, BOTTOM], two(offset=(1 << 63) - 1, length=(1 << 63) - 1)))
dcp_case("dcp-item-negative", ("offset",), lambda: dcp([4, 3], [TOP, BOTTOM], two(offset=-1)))
dcp_case("dcp-item-in-the-middle", (FILE,), lambda: dcp([4, 3], [TOP, BOTTOM], two(offset=10)))
dcp_case("dcp-os-system", ("posix.system",), lambda: PROTO + system + STOP)
dcp_case("dcp-metadata-os-system", ("posix.system",), lambda: dcp([4, 3], [TOP, BOTTOM], two(), planner_data=system))
dcp_case("dcp-getattr", ("builtins.getattr",), lambda: PROTO + call(name("builtins", "getattr"), name(META, "Metadata"), text("__init__")) + STOP)
dcp_case("dcp-path-function", ("pathlib.os.system",), lambda: PROTO + call(name("pathlib", "os.system"), text(COMMAND)) + STOP)
dcp_case("dcp-data-os-system", ("posix.system",), lambda: dcp([4, 3], [TOP, BOTTOM], two(length=len(EVIL) - len(ROWS))), lambda: EVIL)
dcp_case("dcp-data-missing", ("__1_0.distcp",), lambda: dcp([4, 3], [TOP, BOTTOM], two(file="__1_0.distcp")))
dcp_case("dcp-data-cut", ("truncated",), lambda: dcp([4, 3], [TOP, BOTTOM], two()), lambda: (ROWS + ROWS)[:-1])
dcp_case("dcp-transform", ("zstd",), lambda: dcp([4, 3], [TOP], [dcp_place("w", [0, 0], FILE, 0, 9)[:-2] + text("transform_descriptors") + EMPTY_LIST + text("zstd") + APPEND + SETITEM + BUILD + SETITEM]))
CASES["dcp-unfinished"] = (lambda: {FILE: ROWS}, ("did not finish",))
CASES["dcp-metadata-empty"] = (lambda: {".metadata": b"", FILE: ROWS}, (".metadata",))


def dcp_pieces(first, second, shapes=([2, 3], [2, 3])):
    files = {}
    for i, at in enumerate((first, second)):
        about = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": at}}), "DCP_VERSION": "1.0", "format": "pt"}
        count = shapes[i][0] * shapes[i][1] * 4
        files[f"shard-0000{i + 1}-model-00001-of-00001.safetensors"] = safetensors({"__metadata__": about, "w": entry(0, count, shapes[i])}, bytes(count))
    return files


CASES["dcp-hf-overlap"] = (lambda: dcp_pieces([0, 0], [1, 0]), ("overlap",))
CASES["dcp-hf-hole"] = (lambda: dcp_pieces([0, 0], [5, 0]), ("elements",))
CASES["dcp-hf-negative"] = (lambda: dcp_pieces([0, 0], [-2, 0]), ("offset",))
CASES["dcp-hf-overflow"] = (lambda: dcp_pieces([0, 0], [(1 << 63) - 1, 0]), ("63 bits",))
CASES["dcp-hf-missing-shard"] = (lambda: {k: v for k, v in dcp_pieces([0, 0], [2, 0]).items() if "00002" in k}, ("missing",))


# --- valid files with names that would play tricks on a terminal, a page or a shell ----------------------------------

TRICKS = "\x1b[2J\x1b]0;title\x07\r\n<script>alert(1)</script>'\"$(touch shardsmith-canary)`\u202e../../x"
NAMES = {
    "names-that-trick.pt": lambda: torch_file(state(tensor((2, 3), (3, 1), 6), TRICKS), ("data/0", bytes(24))),
    "names-that-trick.safetensors": lambda: safetensors({"__metadata__": {TRICKS: TRICKS}, TRICKS: entry(0, 4, [1])}, bytes(4)),
}
LINKED = "hf-companion-link-out"  # valid weights beside a link to somebody's file


# --- onto the disk ---------------------------------------------------------------------------------------------------


def write(folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for outside in ("outside.safetensors", "outside.pt", "outside.distcp"):
        (folder / outside).write_bytes(WEIGHTS if outside.endswith("safetensors") else good())
    (folder / "good.pt").write_bytes(good())
    linked = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "tokenizer.json": "../outside.secret"}
    (folder / "outside.secret").write_bytes(b"a secret")
    made = {file: make for file, (make, _) in CASES.items()} | NAMES | {LINKED: lambda: linked}
    for file, make in made.items():
        content = make()
        if isinstance(content, bytes):
            (folder / file).write_bytes(content)
            continue
        (folder / file).mkdir(exist_ok=True)
        for inner, data in content.items():
            place = folder / file / inner
            if isinstance(data, str):  # a link
                place.unlink(missing_ok=True)
                os.symlink(data, place)
            else:
                place.write_bytes(data)


if __name__ == "__main__":
    write(sys.argv[1])
