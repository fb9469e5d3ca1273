# Process all spans of acknowledged offsets: the twins of the classes of kproxy.trail.spans.

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
    int64_t kp_map_spans(uint64_t *bits, int64_t low, uint64_t mapped, const kp_spans *spans)
    int64_t kp_least_offset(const kp_spans *spans)
    char *kp_put_decimal(char *to, int64_t number)
    char *kp_put_json(char *to, const kp_spans *spans)
    enum:
        KP_BITMAP_WORDS
        KP_NUMBER_BYTES
        KP_SPAN_BYTES

cdef extern from *:
    """
    /* As in kproxy_codec.record_batch. */
    #define NO_SEQUENCE (-1)
    #define MAX_SEQUENCE 0x7FFFFFFF
    #define MAX_OFFSET INT64_MAX
    /* As in kproxy.trail.spans. */
    #define MAX_SPANS 500
    #define MAX_LATENCIES 32
    #define MICROS 1e6
    /* Room is made for so many. */
    #define LATENCIES_AT_ONCE 8
    /* Of a row in JSON: numbers beside its spans and latencies, and at most the bytes of their names. */
    #define ROW_FIELDS 9
    #define ROW_TEXT_BYTES 256
    """
    const int64_t NO_SEQUENCE, MAX_SEQUENCE, MAX_OFFSET
    const uint32_t MAX_SPANS, MAX_LATENCIES, LATENCIES_AT_ONCE
    const Py_ssize_t ROW_FIELDS, ROW_TEXT_BYTES
    const double MICROS

cdef array _EMPTY = array("q")
cdef uint64_t _bitmap[KP_BITMAP_WORDS]


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
        raise TypeError("an array of 64-bit integers is expected")
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
    def base_offset(self):
        cdef kp_interval span
        if not self.held.count:
            raise IndexError("no spans")
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
            raise ValueError(f"{most} spans")
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


cdef inline char *put_text(char *to, const char *text) noexcept:
    cdef size_t size = strlen(text)
    memcpy(to, text, size)
    return to + size


cdef inline char *put_field(char *to, const char *name, int64_t value) noexcept:
    return kp_put_decimal(put_text(to, name), value)


@cython.final
@cython.no_gc
cdef class OpenRow(Chunk):
    """See kproxy.trail.spans.OpenRow."""

    cdef readonly int64_t acks, first_acked_at, last_acked_at
    cdef readonly double began
    cdef int64_t *latencies
    cdef uint32_t latency_count

    def __init__(self, Chunk chunk not None, int64_t acks, double began, int64_t first_acked_at, int64_t acked_at):
        self.become(chunk)
        self.acks, self.began = acks, began
        self.first_acked_at, self.last_acked_at = first_acked_at, acked_at

    def __dealloc__(self):
        PyMem_Free(self.latencies)

    cdef inline bint may_take(self, Chunk chunk, int64_t acks):
        return acks == self.acks and self.held.count < MAX_SPANS and self.is_continued_by(chunk)

    def take(self, Chunk chunk not None, int64_t acks, int64_t acked_at):
        if not self.may_take(chunk, acks):
            return False
        self.go_on(chunk)
        self.last_acked_at = acked_at
        return True

    def sample(self, double latency_s):
        self.add_latency(latency_s)

    cdef inline int add_latency(self, double latency_s) except -1:
        """Like `sample`."""
        if self.latency_count == MAX_LATENCIES:
            return 0
        if self.latency_count % LATENCIES_AT_ONCE == 0:
            room = PyMem_Realloc(self.latencies, (self.latency_count + LATENCIES_AT_ONCE) * sizeof(int64_t))
            if room == NULL:
                raise MemoryError
            self.latencies = <int64_t *>room
        # To the nearest, as Python's round().
        self.latencies[self.latency_count] = llrint(latency_s * MICROS)
        self.latency_count += 1
        return 0

    def as_json(self):
        cdef Py_ssize_t numbers = 2 * <Py_ssize_t>self.held.count + self.latency_count + ROW_FIELDS + 1
        cdef char *text = <char *>PyMem_Malloc(numbers * KP_NUMBER_BYTES + ROW_TEXT_BYTES)
        cdef char *to
        cdef uint32_t at
        if text == NULL:
            raise MemoryError
        try:
            to = put_field(text, b'"producer_id":', self.producer_id)
            to = put_field(to, b',"producer_epoch":', self.producer_epoch)
            to = put_field(to, b',"first_sequence":', self.first_sequence)
            to = put_field(to, b',"base_offset":', self.base_offset)
            to = put_field(to, b',"record_count":', self.record_count)
            to = put_field(to, b',"batches":', self.batches)
            to = put_field(to, b',"bytes":', self.bytes)
            to = put_field(to, b',"first_acked_at":', self.first_acked_at)
            to = put_field(to, b',"last_acked_at":', self.last_acked_at)
            to = kp_put_json(put_text(to, b',"spans":['), &self.held)
            to = put_text(to, b'],"latency_us":[')
            for at in range(self.latency_count):
                to = put_field(to, b"," if at else b"", self.latencies[at])
            to[0] = b"]"
            return PyBytes_FromStringAndSize(text, to + 1 - text)
        finally:
            PyMem_Free(text)

    @property
    def latency_us(self):
        return [self.latencies[at] for at in range(self.latency_count)]


@cython.final
@cython.no_gc
cdef class Intervals:
    """See kproxy.trail.spans.Intervals."""

    cdef readonly int64_t floor
    cdef kp_interval *all
    cdef size_t count

    def __dealloc__(self):
        PyMem_Free(self.all)

    @property
    def starts(self):
        cdef size_t at
        return [self.all[at].start for at in range(self.count)]

    @property
    def ends(self):
        cdef size_t at
        return [self.all[at].end for at in range(self.count)]

    @property
    def high(self):
        return self.last_end()

    cdef inline int64_t last_end(self):
        return self.all[self.count - 1].end if self.count else self.floor

    def replace(self, int64_t floor, list starts, list ends):
        cdef size_t at
        if len(starts) != len(ends):
            raise ValueError(f"{len(starts)} starts and {len(ends)} ends")
        self.have(NULL, len(starts))
        self.floor = floor
        for at in range(self.count):
            self.all[at].start, self.all[at].end = starts[at], ends[at]

    cdef int have(self, const kp_interval *others, size_t count) except -1:
        """Have other intervals; those at NULL are set by the caller."""
        cdef void *room
        if count != self.count:
            room = PyMem_Realloc(self.all, count * sizeof(kp_interval))
            if room == NULL:
                raise MemoryError
            self.all, self.count = <kp_interval *>room, count
        if others != NULL:
            memcpy(self.all, others, count * sizeof(kp_interval))
        return 0

    def take(self, list added not None, size_t most):
        if not most:
            raise ValueError("room for no interval")
        return self.follow(added, most) or self.merge(added, most)

    cdef bint follow(self, list added, size_t most) except -1:
        """Like `take`, where all spans together are one interval behind the others, as mostly; else False."""
        cdef Chunk chunk
        cdef int64_t low = self.last_end(), records = 0
        cdef size_t excess
        for _, chunk in added:
            # Of each chunk, so that the sum cannot be too large.
            if not 0 <= chunk.record_count <= 64 * KP_BITMAP_WORDS - records:
                return False
            records += chunk.record_count
        # Mostly they begin where the others end.
        if not self.count or not self.map(added, low, records):
            low = MAX_OFFSET
            for _, chunk in added:
                low = min(low, kp_least_offset(&chunk.held))
            if low < self.last_end() or low == MAX_OFFSET or not self.map(added, low, records):
                return False
        if not self.count or self.all[self.count - 1].end != low:
            if self.count >= most:
                excess = self.count + 1 - most
                self.floor = self.all[excess - 1].end
                memmove(self.all, self.all + excess, (most - 1) * sizeof(kp_interval))
            self.have(NULL, min(self.count + 1, most))
            self.all[self.count - 1].start = low
        self.all[self.count - 1].end = low + records
        return True

    cdef bint map(self, list added, int64_t low, int64_t records) except -1:
        """Whether the spans are the interval that begins at `low` and has so many records."""
        cdef Chunk chunk
        cdef int64_t mapped, left = records
        memset(_bitmap, 0, (records + 63) // 64 * sizeof(uint64_t))
        for _, chunk in added:
            mapped = kp_map_spans(_bitmap, low, records, &chunk.held)
            if mapped < 0:
                return False
            left -= mapped
        return left == 0

    cdef bint merge(self, list added, size_t most) except -1:
        """Like `take`."""
        cdef size_t count = self.count
        cdef uint32_t at
        cdef kp_interval *all
        cdef kp_interval *last
        cdef const uint8_t *place
        cdef kp_interval span
        cdef Chunk chunk
        for _, chunk in added:
            count += chunk.held.count
        if not count:
            return False
        all = <kp_interval *>PyMem_Malloc(2 * count * sizeof(kp_interval))
        if all == NULL:
            raise MemoryError
        block = all
        try:
            if self.count:
                memcpy(all, self.all, self.count * sizeof(kp_interval))
            last = all + self.count
            for _, chunk in added:
                place = chunk.held.bytes
                span.end = 0
                for at in range(chunk.held.count):
                    place = kp_next_span(place, &span)
                    last[0] = span
                    last += 1
            all = kp_sort_intervals(all, all + count, count)
            if all[0].start < self.floor:
                return False
            count = kp_join_intervals(all, count)
            if not count:
                return False
            if count > most:
                self.floor = all[count - most - 1].end
                all += count - most
                count = most
            self.have(all, count)
            return True
        finally:
            PyMem_Free(block)
