# Process all spans of acknowledged offsets: the twins of functions of kproxy.trail.spans, and of its Chunk.

cdef extern from "spans.h" nogil:
    ctypedef struct kp_interval:
        int64_t start, end
    kp_interval *kp_sort_intervals(kp_interval *all, kp_interval *spare, size_t count)
    size_t kp_join_intervals(kp_interval *all, size_t count)
    char *kp_put_numbers(char *to, const int64_t *numbers, size_t count)
    enum:
        KP_NUMBER_BYTES

cdef extern from *:
    """
    /* As in kproxy_codec.record_batch. */
    #define NO_SEQUENCE (-1)
    #define MAX_SEQUENCE 0x7FFFFFFF
    """
    const int64_t NO_SEQUENCE, MAX_SEQUENCE

cdef array _EMPTY = array("q")


cdef inline array array_of(const int64_t *numbers, Py_ssize_t count):
    cdef array found = clone(_EMPTY, count, False)
    memcpy(found.data.as_voidptr, numbers, count * sizeof(int64_t))
    return found


@cython.final
@cython.freelist(256)
@cython.no_gc
cdef class Chunk:
    """See kproxy.trail.spans.Chunk."""

    cdef readonly int64_t producer_id, producer_epoch, first_sequence, next_sequence, record_count, batches, bytes
    cdef readonly array spans

    def __init__(
        self, int64_t producer_id, int64_t producer_epoch, int64_t first_sequence, array spans, int64_t record_count,
        int64_t batches, int64_t bytes,
    ):
        self.producer_id, self.producer_epoch, self.record_count = producer_id, producer_epoch, record_count
        self.begin(first_sequence)
        self.spans, self.batches, self.bytes = spans, batches, bytes

    cdef inline void begin(self, int64_t first_sequence):
        """Set where its `record_count` records begin."""
        self.first_sequence = first_sequence
        self.next_sequence = (first_sequence + self.record_count) & MAX_SEQUENCE if first_sequence >= 0 else NO_SEQUENCE

    def copy(self):
        return Chunk(
            self.producer_id, self.producer_epoch, self.first_sequence,
            array_of(<int64_t *>self.spans.data.as_voidptr, len(self.spans)), self.record_count, self.batches,
            self.bytes)

    def extend(self, Chunk more not None):
        cdef array spans = self.spans, others = more.spans
        cdef Py_ssize_t count = len(spans), added = len(others)
        cdef int64_t *last = <int64_t *>spans.data.as_voidptr + count - 2
        cdef const int64_t *first = <int64_t *>others.data.as_voidptr
        if (
            more.first_sequence != self.next_sequence
            or more.producer_id != self.producer_id
            or more.producer_epoch != self.producer_epoch
        ):
            return False
        if count and last[0] + last[1] == first[0]:
            last[1] += first[1]
            first += 2
            added -= 2
        if added:
            resize_smart(spans, count + added)
            memcpy(<int64_t *>spans.data.as_voidptr + count, first, added * sizeof(int64_t))
        self.next_sequence = more.next_sequence
        self.record_count += more.record_count
        self.batches += more.batches
        self.bytes += more.bytes
        return True

    def shorten(self, Py_ssize_t most):
        cdef Py_ssize_t excess = 2 * (len(self.spans) // 2 - most), left = len(self.spans) - excess, at
        cdef int64_t *numbers = <int64_t *>self.spans.data.as_voidptr
        if excess <= 0:
            return
        if self.first_sequence >= 0:
            for at in range(1, excess, 2):
                self.first_sequence = (self.first_sequence + numbers[at]) & MAX_SEQUENCE
        memmove(numbers, numbers + excess, left * sizeof(int64_t))
        resize_smart(self.spans, left)


def union(int64_t floor, list starts, list ends, list added, Py_ssize_t most):
    """See kproxy.trail.spans.union."""
    cdef Py_ssize_t at, count = len(starts), left
    cdef kp_interval *all
    cdef array spans
    cdef int64_t *numbers
    for spans in added:
        count += len(spans) // 2
    all = <kp_interval *>PyMem_Malloc(2 * count * sizeof(kp_interval) + 1)
    if all == NULL:
        raise MemoryError
    block = all
    try:
        left = len(starts)
        for at in range(left):
            all[at].start, all[at].end = starts[at], ends[at]
        for spans in added:
            numbers = <int64_t *>spans.data.as_voidptr
            for at in range(0, len(spans) - 1, 2):
                all[left].start, all[left].end = numbers[at], numbers[at] + numbers[at + 1]
                left += 1
        all = kp_sort_intervals(all, all + count, count)
        if all[0].start < floor:
            return None
        left = kp_join_intervals(all, count)
        if not left:
            return None
        if left > most:
            floor = all[left - most - 1].end
            all += left - most
            left = most
        starts, ends = [], []
        for at in range(left):
            starts.append(all[at].start)
            ends.append(all[at].end)
        return floor, starts, ends
    finally:
        PyMem_Free(block)


def to_json(array spans):
    """See kproxy.trail.spans.to_json."""
    cdef char *text = <char *>PyMem_Malloc(len(spans) * KP_NUMBER_BYTES + 2)
    cdef char *end
    if text == NULL:
        raise MemoryError
    try:
        text[0] = b"["
        end = kp_put_numbers(text + 1, <const int64_t *>spans.data.as_voidptr, len(spans))
        end[0] = b"]"
        return PyBytes_FromStringAndSize(text, end + 1 - text)
    finally:
        PyMem_Free(text)
