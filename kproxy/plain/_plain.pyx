# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=False
# cython: allow_none_for_extension_args=False
"""Forward the usual requests in compiled code: produce requests whose routes are all proven, and repeated reads.

Where this is not built, every request goes through the core (kproxy.routing.fanout), which is the reference. Code that
both need exists here and in Python; counters are fields of Python structures, which counters.pxi changes. The twins:

  frames.pxi    kproxy_codec.framing, kproxy_codec.correlation
  outbox.pxi    kproxy.proxy.outbox
  answers.pxi   kproxy.proxy.answer_order
  chunks.pxi    the open chunk of kproxy.trail.acknowledgements
  readers.pxi   kproxy.proxy.request_reader, kproxy.proxy.answer_reader
  spans.pxi     a class and a function of kproxy.trail.spans

`CompiledPath` (path.pxi) gets every whole frame of a client first. A request that passes the gate below is indexed, sent
by the routes of its partitions, answered and noted here; everything else is left to the core from the same frame, with
nothing changed. A request that was sent here and does not succeed enters the core: kproxy.proxy.plain_path hands it over.

The gate: a produce request that wire.h indexes, of an offered version, with acks 1 or all or acks=0 that is confirmed,
no partition twice, a deadline ahead, and room for its partitions. The core is quiet and has handled the topology's
version. The client may write to the topics, and none of them has a writer group. Every partition's route is proven.

A consumer asks again and again for the same partitions. If one broker has answered the last read alone, the next one
that differs only in offsets goes to it from here (reads.pxi), one at a time. The core gets all other reads.

States of a slot
  open      some of its parts are unanswered
  filled    its whole answer is known; `AnswerOrder` writes it in its turn

Invariants
1. Nothing is changed before the gate is passed, and after it nothing can fail except an allocation of memory.
2. A route is kept only for the generation of the core's routes that it was found in (kproxy.routing.routes).
3. At most MOST_PLACES partition indexes are kept, proven or not; then all are forgotten.
4. A receive buffer is kept until the slots of its requests are written: the answers, the trail and a hand-over to the
   core read it. A slot without open parts refers to nothing that refers to it, so that its buffer is free at once.
5. The gate for all requests is checked once for all frames of one read, and again after each that Python begins:
   nothing else in between changes it.
6. There is no I/O here: transports are called as Python calls them, so that TLS can be below.
7. Each index, size and view that comes from Python is checked before memory is read or written by it. The structures and
   arrays that Python counts in are checked once: they keep their size, and the arrays are never replaced.
"""

cimport cython
from cpython.array cimport array, clone
from cpython.buffer cimport PyBUF_WRITABLE, PyBUF_WRITE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.memoryview cimport PyMemoryView_Check, PyMemoryView_FromMemory, PyMemoryView_GET_BUFFER
from libc.math cimport INFINITY
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memmove, memset

from ctypes import Structure
from time import monotonic
from weakref import WeakKeyDictionary

from kproxy_codec.correlation import unexpected_answer
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import illegal_length

cdef extern from "Python.h":
    # Without a reference, as it is only fetched.
    void *PyList_GET_ITEM(object list, Py_ssize_t at)

cdef extern from *:
    """
    #ifndef KPROXY_PLAIN_SOURCES
    #define KPROXY_PLAIN_SOURCES ""
    #endif
    """
    const char *KPROXY_PLAIN_SOURCES

cdef extern from "wire.h" nogil:
    enum:
        KP_MAX_PARTITIONS
        KP_MAX_SORTED_INDEX
        KP_MAX_VERSION
        KP_CORRELATION_ID_OFFSET
        KP_ACKS_BEFORE_TOPICS
        KP_TOPIC_IDS_FROM
        KP_FLEXIBLE_FROM
        KP_ANSWER_CORRELATION_ID_OFFSET
        KP_DELTA_OFFSET
        KP_PRODUCER_OFFSET
        KP_PRODUCER_BYTES
        KP_SEQUENCE_OFFSET
    ctypedef struct kp_topic:
        uint32_t head_start, name_start, name_end, first, count, tail_start, tail_end
    ctypedef struct kp_entry:
        uint32_t start, end, records, topic
        int32_t partition_index, last_offset_delta, base_sequence
    ctypedef struct kp_request:
        uint32_t size, topics_start, topics_end, topic_count, entry_count, id_start, id_end
        int32_t correlation_id, timeout_ms
        int16_t version, acks
        int is_transactional
    int16_t kp_int16(const uint8_t *p)
    int32_t kp_int32(const uint8_t *p)
    int64_t kp_int64(const uint8_t *p)
    void kp_put_int16(uint8_t *p, int16_t value)
    void kp_put_int32(uint8_t *p, int32_t value)
    uint8_t *kp_put_count(uint8_t *p, uint32_t count, int flexible)
    int kp_scan(const uint8_t *frame, uint32_t size, kp_request *request, kp_topic *topics, kp_entry *entries)
    int kp_read_batch(const uint8_t *frame, int flexible, kp_entry *entry)
    uint32_t kp_result_bytes(int version)
    uint32_t kp_of_one_topic(const kp_entry *entries, const uint32_t *chosen, uint32_t start, uint32_t count)
    uint32_t kp_topics_of(const kp_entry *entries, const uint32_t *chosen, uint32_t count)
    uint32_t kp_answer_bytes(
        const kp_request *request, const kp_topic *topics, const kp_entry *entries, const uint32_t *chosen, uint32_t count)
    int kp_is_success(
        const uint8_t *frame, const kp_request *request, const kp_topic *topics, const kp_entry *entries,
        const uint32_t *chosen, uint32_t count, const uint8_t *answer, uint32_t size, uint32_t *results)
    int kp_sort(
        const uint8_t *frame, const kp_request *request, const kp_topic *topics, const kp_entry *entries,
        const uint32_t *chosen, uint32_t count, uint8_t *answer, uint32_t size, uint8_t *spare, uint16_t *places,
        uint32_t *results)
    void kp_put_answer(
        const uint8_t *frame, const kp_request *request, const kp_topic *topics, uint8_t *answer, uint32_t size,
        uint32_t *results)
    uint32_t kp_part_bytes(
        const kp_request *request, const kp_topic *topics, const kp_entry *entries, const uint32_t *chosen, uint32_t count)
    void kp_part(
        const uint8_t *frame, const kp_request *request, const kp_topic *topics, const kp_entry *entries,
        const uint32_t *chosen, uint32_t count, int32_t correlation_id, uint8_t *part, uint32_t bytes)


cdef extern from *:
    """
    #if defined(__GLIBC__)
    #include <malloc.h>
    static int kp_keep_freed(int most) { return mallopt(M_MMAP_THRESHOLD, most) && mallopt(M_TRIM_THRESHOLD, most); }
    #else
    static int kp_keep_freed(int most) { return 1; }
    #endif
    """
    int kp_keep_freed(int most)

cdef class Clock
cdef class TopicUses
cdef class Outbox
cdef class Slot
cdef class AnswerOrder
cdef class CompiledPath
cdef class CompiledRead
cdef class CompiledSlot
cdef class AnswerReader

# The digest of the sources that this was built from (kproxy.plain.sources).
SOURCES = KPROXY_PLAIN_SOURCES.decode()

include "counters.pxi"
include "spans.pxi"
include "frames.pxi"
include "outbox.pxi"
include "answers.pxi"
include "chunks.pxi"
include "reads.pxi"
include "path.pxi"
include "readers.pxi"


def keep_freed(int most):
    """Let glibc's allocator keep this many freed bytes: the kernel clears each page that it gives out again."""
    if not kp_keep_freed(most):
        raise ValueError(f"the allocator does not keep {most} freed bytes")


def resize(buffer, Py_ssize_t size):
    """Give a bytearray, of any subclass, a size; new bytes are not cleared, as an answer is received into them."""
    if not isinstance(buffer, bytearray):
        raise TypeError("expected a bytearray")
    PyByteArray_Resize(buffer, size)


cdef bint is_success(
    const uint8_t *frame, const kp_request *request, const kp_topic *topics, const kp_entry *entries,
    const uint32_t *chosen, uint32_t count, uint8_t *answer, uint32_t size,
) except -1:
    """Whether an answer has a success for exactly these entries, and nothing unusual. Put it into their order."""
    cdef uint8_t *spare
    cdef bint is_sorted
    if kp_is_success(frame, request, topics, entries, chosen, count, answer, size, _results):
        return True
    # One entry has one order.
    if count == 1:
        return False
    spare = <uint8_t *>PyMem_Malloc(size)
    if spare == NULL:
        raise MemoryError
    is_sorted = kp_sort(
        frame, request, topics, entries, chosen, count, answer, size, spare, _sorted_places, _results)
    PyMem_Free(spare)
    return is_sorted


# The functions of wire.h and fetch.h, for tests.

cdef uint32_t _index(frame, kp_request *head) except 0xFFFFFFFF:
    cdef const uint8_t *data = data_of(frame)
    return kp_scan(data, <uint32_t>PyMemoryView_GET_BUFFER(frame).len, head, _topics, _entries)


cdef uint32_t _choose(selection, const kp_request *head, uint32_t *chosen) except 0xFFFFFFFF:
    cdef uint32_t count = 0, place, ordinal
    for place, ordinals in selection:
        for ordinal in ordinals:
            if place >= head.topic_count or ordinal >= _topics[place].count or count == KP_MAX_PARTITIONS:
                raise IndexError(f"the request has no partition {ordinal} of topic {place}")
            chosen[count] = _topics[place].first + ordinal
            count += 1
    return count


def index(frame not None):
    """The index of a request, a memoryview, if it has the usual form; else None."""
    cdef kp_request head
    cdef uint32_t place, at
    if not _index(frame, &head):
        return None
    topics = []
    for place in range(head.topic_count):
        topic = _topics[place]
        entries = [
            (_entries[at].partition_index, _entries[at].start, _entries[at].end, _entries[at].records)
            for at in range(topic.first, topic.first + topic.count)
        ]
        spans = (topic.head_start, topic.name_start, topic.name_end, topic.tail_start, topic.tail_end)
        topics.append((spans, entries))
    return head.version, head.correlation_id, head.acks, head.timeout_ms, head.topics_start, head.topics_end, topics


def part(frame not None, selection, int32_t correlation_id):
    """The request with only the selected entries (kproxy_codec.partitioned.Splitter)."""
    cdef kp_request head
    cdef uint32_t chosen[KP_MAX_PARTITIONS]
    if not _index(frame, &head):
        raise ValueError("the request cannot be indexed")
    cdef uint32_t count = _choose(selection, &head, chosen)
    cdef uint32_t size = kp_part_bytes(&head, _topics, _entries, chosen, count)
    cdef bytes encoded = PyBytes_FromStringAndSize(NULL, size)
    kp_part(
        <const uint8_t *>PyMemoryView_GET_BUFFER(frame).buf, &head, _topics, _entries, chosen, count, correlation_id,
        <uint8_t *>PyBytes_AS_STRING(encoded), size)
    return encoded


def results(frame not None, selection, answer not None):
    """The offsets of the selected entries' results in an answer, a memoryview, that has only successes; else None.

    The answer is put into the order of the selection.
    """
    cdef kp_request head
    cdef uint32_t chosen[KP_MAX_PARTITIONS]
    cdef uint32_t at
    cdef uint8_t *received = data_of(answer)
    if not _index(frame, &head):
        raise ValueError("the request cannot be indexed")
    cdef uint32_t count = _choose(selection, &head, chosen)
    if not is_success(
        <const uint8_t *>PyMemoryView_GET_BUFFER(frame).buf, &head, _topics, _entries, chosen, count,
        received, <uint32_t>PyMemoryView_GET_BUFFER(answer).len,
    ):
        return None
    return [_results[at] for at in range(count)]


def vote(use, batches not None):
    """Add batches, each a partition and its bytes, to a kproxy.observe.busiest.Use."""
    for partition_index, nbytes in batches:
        kp_vote(use_of(use), partition_index, nbytes)


def read_again(request, frame not None):
    """The known `request`, one of kproxy_codec.fetch, for the offsets of a frame, a memoryview; None if it differs more."""
    cdef _KnownRead known = _KnownRead.__new__(_KnownRead)
    cdef uint32_t size = <uint32_t>len(frame)
    cdef const uint8_t *data = data_of(frame)
    known.keep(request)
    if not kp_reads_again(data, size, &known.read):
        return None
    encoded = PyBytes_FromStringAndSize(NULL, size)
    kp_read_again(data, &known.read, <uint8_t *>PyBytes_AS_STRING(encoded))
    return encoded


def has_read(request, answer not None):
    """Whether an answer, a memoryview, can be passed on; it is blanked then."""
    cdef _KnownRead known = _KnownRead.__new__(_KnownRead)
    known.keep(request)
    return bool(kp_has_read(data_of(answer), <uint32_t>len(answer), &known.read))
