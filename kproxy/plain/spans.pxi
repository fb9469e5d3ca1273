# Keep and join acknowledged offsets: the twins of `Chunk` and `join` of kproxy.trail.spans.

cdef extern from "spans.h" nogil:
    ctypedef struct kp_interval:
        int64_t start, end
    ctypedef struct kp_spans:
        uint8_t *bytes
        int64_t end
        uint32_t size, room, count, last
    void kp_put_span(kp_spans *spans, int64_t first, int64_t records)
    const uint8_t *kp_next_span(const uint8_t *start, kp_interval *span)
    void kp_add_spans(kp_spans *spans, const kp_spans *more)
    kp_interval *kp_sort_intervals(kp_interval *all, kp_interval *spare, size_t count)
    size_t kp_join_intervals(kp_interval *all, size_t count)
    char *kp_put_json(char *to, const kp_spans *spans)
    enum:
        KP_NUMBER_BYTES
        KP_SPAN_BYTES

cdef extern from *:
    """
    /* As in kproxy_codec.record_batch. */
    #define NO_SEQUENCE (-1)
    #define MAX_SEQUENCE 0x7FFFFFFF
    """
    const int64_t NO_SEQUENCE, MAX_SEQUENCE

cdef array _EMPTY = array("q")


cdef array array_of(const kp_spans *spans):
    cdef array found = clone(_EMPTY, 2 * <Py_ssize_t>spans.count, False)
    cdef int64_t *numbers = <int64_t *>found.data.as_voidptr
    cdef const uint8_t *at = spans.bytes
    cdef kp_interval span
    cdef uint32_t number
    span.start = span.end = 0
    for number in range(spans.count):
        at = kp_next_span(at, &span)
        numbers[2 * number], numbers[2 * number + 1] = span.start, span.end - span.start
    return found


cdef int set_spans(kp_spans *spans, array numbers) except -1:
    cdef int64_t *given = <int64_t *>numbers.data.as_voidptr
    cdef Py_ssize_t at
    if numbers.itemsize != sizeof(int64_t):
        raise TypeError("expected an array of 64-bit integers")
    spans.size = spans.count = 0
    spans.end = 0
    for at in range(0, len(numbers) - 1, 2):
        have_room(spans, KP_SPAN_BYTES)
        kp_put_span(spans, given[at], given[at + 1])
    return 0


cdef int set_room(kp_spans *spans, uint32_t room) except -1:
    """Have room for exactly this many bytes, which are not less than there are."""
    cdef void *bytes = PyMem_Realloc(spans.bytes, room)
    if bytes == NULL:
        raise MemoryError
    spans.bytes, spans.room = <uint8_t *>bytes, room
    return 0


cdef inline int have_room(kp_spans *spans, uint32_t more) except -1:
    """Have room for so many more bytes."""
    if spans.room - spans.size < more:
        set_room(spans, spans.size + spans.size // 2 + more)
    return 0


cdef inline int add_spans(kp_spans *spans, const kp_spans *more) except -1:
    have_room(spans, more.size + KP_SPAN_BYTES)
    kp_add_spans(spans, more)
    return 0


@cython.freelist(256)
@cython.no_gc
cdef class Chunk:
    """See kproxy.trail.spans.Chunk."""

    cdef readonly int64_t producer_id, producer_epoch, first_sequence, next_sequence, record_count, batches, bytes
    cdef kp_spans held

    def __init__(
        self, int64_t producer_id, int64_t producer_epoch, int64_t first_sequence, array spans, int64_t record_count,
        int64_t batches, int64_t bytes,
    ):
        self.producer_id, self.producer_epoch, self.record_count = producer_id, producer_epoch, record_count
        self.begin(first_sequence)
        self.batches, self.bytes = batches, bytes
        set_spans(&self.held, spans)

    def __dealloc__(self):
        PyMem_Free(self.held.bytes)

    @cython.final
    cdef inline void begin(self, int64_t first_sequence):
        """Set where its `record_count` records begin."""
        self.first_sequence = first_sequence
        self.next_sequence = (first_sequence + self.record_count) & MAX_SEQUENCE if first_sequence >= 0 else NO_SEQUENCE

    @cython.final
    cdef inline int become(self, Chunk other) except -1:
        """Have the same batches."""
        self.producer_id, self.producer_epoch = other.producer_id, other.producer_epoch
        self.first_sequence, self.next_sequence = other.first_sequence, other.next_sequence
        self.record_count, self.batches, self.bytes = other.record_count, other.batches, other.bytes
        return add_spans(&self.held, &other.held)

    @property
    def spans(self):
        return array_of(&self.held)

    @property
    def span_count(self):
        return self.held.count

    def spans_as_json(self):
        cdef char *text = <char *>PyMem_Malloc((2 * <size_t>self.held.count + 1) * KP_NUMBER_BYTES)
        if text == NULL:
            raise MemoryError
        try:
            return PyBytes_FromStringAndSize(text, kp_put_json(text, &self.held) - text)
        finally:
            PyMem_Free(text)

    @property
    def base_offset(self):
        cdef kp_interval span
        if not self.held.count:
            raise IndexError("the chunk has no spans")
        span.end = 0
        kp_next_span(self.held.bytes, &span)
        return span.start

    def copy(self):
        cdef Chunk copied = Chunk.__new__(Chunk)
        copied.become(self)
        return copied

    def extend(self, Chunk more not None):
        return self.go_on(more)

    @cython.final
    cdef inline bint go_on(self, Chunk more) except -1:
        """Like `extend`."""
        if not self.is_continued_by(more):
            return False
        add_spans(&self.held, &more.held)
        self.next_sequence = more.next_sequence
        self.record_count += more.record_count
        self.batches += more.batches
        self.bytes += more.bytes
        return True

    @cython.final
    cdef inline bint is_continued_by(self, Chunk more):
        return (
            more.first_sequence == self.next_sequence
            and more.producer_id == self.producer_id
            and more.producer_epoch == self.producer_epoch
        )

    def shorten(self, int64_t most):
        self.leave(most)

    @cython.final
    cdef int leave(self, int64_t most) except -1:
        """Like `shorten`."""
        cdef int64_t excess = self.held.count - most, number
        cdef const uint8_t *at = self.held.bytes
        cdef kp_interval span
        cdef kp_spans left
        if most < 0:
            raise ValueError(f"invalid number of spans {most}; expected 0 or more")
        if excess <= 0:
            return 0
        span.start = span.end = 0
        for number in range(excess):
            at = kp_next_span(at, &span)
            if self.first_sequence >= 0:
                self.first_sequence = (self.first_sequence + span.end - span.start) & MAX_SEQUENCE
        memset(&left, 0, sizeof(left))
        if excess < self.held.count:
            # The first one's distance is from 0 now.
            set_room(&left, self.held.size - <uint32_t>(at - self.held.bytes) + KP_SPAN_BYTES)
            at = kp_next_span(at, &span)
            kp_put_span(&left, span.start, span.end - span.start)
            if excess + 1 < self.held.count:
                memcpy(left.bytes + left.size, at, self.held.size - (at - self.held.bytes))
                left.last = left.size + self.held.last - <uint32_t>(at - self.held.bytes)
                left.size += self.held.size - <uint32_t>(at - self.held.bytes)
                left.count, left.end = self.held.count - <uint32_t>excess, self.held.end
        PyMem_Free(self.held.bytes)
        self.held = left
        return 0


def join(list starts not None, list ends not None, list added not None):
    """See kproxy.trail.spans."""
    cdef size_t known = len(starts), count = known, at
    cdef uint32_t number
    cdef const uint8_t *place
    cdef kp_interval *all
    cdef kp_interval *last
    cdef kp_interval span
    cdef Chunk chunk
    if <size_t>len(ends) != known:
        raise ValueError(f"expected as many ends as starts; got {len(starts)} starts and {len(ends)} ends")
    for each in added:
        if not isinstance(each, Chunk):
            raise TypeError(f"expected a Chunk; got {each!r}")
        count += (<Chunk>each).held.count
    if not count:
        return None
    all = <kp_interval *>PyMem_Malloc(2 * count * sizeof(kp_interval))
    if all == NULL:
        raise MemoryError
    block = all
    try:
        for at in range(known):
            all[at].start, all[at].end = starts[at], ends[at]
        last = all + known
        for chunk in added:
            place = chunk.held.bytes
            span.end = 0
            for number in range(chunk.held.count):
                place = kp_next_span(place, &span)
                last[0] = span
                last += 1
        all = kp_sort_intervals(all, all + count, count)
        count = kp_join_intervals(all, count)
        if not count:
            return None
        return [all[at].start for at in range(count)], [all[at].end for at in range(count)]
    finally:
        PyMem_Free(block)
