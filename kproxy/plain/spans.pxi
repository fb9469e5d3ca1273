# Process all spans of acknowledged offsets: the twins of the classes of kproxy.trail.spans.

cdef extern from "spans.h" nogil:
    ctypedef struct kp_spans:
        int64_t *numbers
        uint32_t count, room
    ctypedef struct kp_interval:
        int64_t start, end
    kp_interval *kp_sort_intervals(kp_interval *all, kp_interval *spare, size_t count)
    size_t kp_join_intervals(kp_interval *all, size_t count)
    int kp_map_spans(uint64_t *bits, int64_t low, int64_t mapped, const kp_spans *spans)
    char *kp_put_numbers(char *to, const int64_t *numbers, size_t count)
    enum:
        KP_BITMAP_WORDS
        KP_NUMBER_BYTES

cdef extern from *:
    """
    /* As in kproxy_codec.record_batch. */
    #define NO_SEQUENCE (-1)
    #define MAX_SEQUENCE 0x7FFFFFFF
    /* As in kproxy.trail.spans. */
    #define MAX_SPANS 500
    #define MAX_LATENCIES 32
    #define MICROS 1e6
    """
    const int64_t NO_SEQUENCE, MAX_SEQUENCE
    const uint32_t MAX_SPANS, MAX_LATENCIES
    const double MICROS

cdef array _EMPTY = array("q")
cdef uint64_t _bitmap[KP_BITMAP_WORDS]


cdef inline array array_of(const int64_t *numbers, Py_ssize_t count):
    cdef array found = clone(_EMPTY, count, False)
    if count:
        memcpy(found.data.as_voidptr, numbers, count * sizeof(int64_t))
    return found


cdef int set_room(kp_spans *spans, uint32_t room) except -1:
    """Have room for exactly this many numbers, which are not less than there are."""
    cdef void *numbers = PyMem_Realloc(spans.numbers, room * sizeof(int64_t))
    if numbers == NULL:
        raise MemoryError
    spans.numbers, spans.room = <int64_t *>numbers, room
    return 0


cdef inline int add_numbers(kp_spans *spans, const int64_t *numbers, uint32_t more) except -1:
    cdef uint32_t count = spans.count + more
    if count > spans.room:
        # None is likely to follow the first ones.
        set_room(spans, count + count // 2 if spans.count else count)
    if more:
        memcpy(spans.numbers + spans.count, numbers, more * sizeof(int64_t))
    spans.count = count
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
        add_numbers(&self.held, <int64_t *>spans.data.as_voidptr, <uint32_t>len(spans))

    def __dealloc__(self):
        PyMem_Free(self.held.numbers)

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
        return add_numbers(&self.held, other.held.numbers, other.held.count)

    @property
    def spans(self):
        return array_of(self.held.numbers, self.held.count)

    @property
    def base_offset(self):
        return self.held.numbers[0]

    def copy(self):
        cdef Chunk copied = Chunk.__new__(Chunk)
        copied.become(self)
        return copied

    def extend(self, Chunk more not None):
        return self.go_on(more)

    @cython.final
    cdef inline bint go_on(self, Chunk more) except -1:
        """Like `extend`."""
        cdef const int64_t *added = more.held.numbers
        cdef uint32_t count = more.held.count
        cdef int64_t *last
        if (
            more.first_sequence != self.next_sequence
            or more.producer_id != self.producer_id
            or more.producer_epoch != self.producer_epoch
        ):
            return False
        if self.held.count:
            last = self.held.numbers + self.held.count - 2
            if last[0] + last[1] == added[0]:
                last[1] += added[1]
                added += 2
                count -= 2
        add_numbers(&self.held, added, count)
        self.next_sequence = more.next_sequence
        self.record_count += more.record_count
        self.batches += more.batches
        self.bytes += more.bytes
        return True

    def shorten(self, int64_t most):
        self.leave(most)

    @cython.final
    cdef int leave(self, int64_t most) except -1:
        """Like `shorten`."""
        cdef int64_t excess = 2 * (self.held.count // 2 - most), at
        if excess <= 0:
            return 0
        if self.first_sequence >= 0:
            for at in range(1, excess, 2):
                self.first_sequence = (self.first_sequence + self.held.numbers[at]) & MAX_SEQUENCE
        self.held.count -= <uint32_t>excess
        memmove(self.held.numbers, self.held.numbers + excess, self.held.count * sizeof(int64_t))
        if self.held.count <= self.held.room // 4:
            set_room(&self.held, self.held.count)
        return 0

    def spans_as_json(self):
        cdef char *text = <char *>PyMem_Malloc(self.held.count * KP_NUMBER_BYTES + 2)
        cdef char *end
        if text == NULL:
            raise MemoryError
        try:
            text[0] = b"["
            end = kp_put_numbers(text + 1, self.held.numbers, self.held.count)
            end[0] = b"]"
            return PyBytes_FromStringAndSize(text, end + 1 - text)
        finally:
            PyMem_Free(text)


@cython.final
@cython.no_gc
cdef class OpenRow(Chunk):
    """See kproxy.trail.spans.OpenRow."""

    cdef readonly int64_t acks, first_acked_at, last_acked_at
    cdef readonly double began
    cdef kp_spans latencies

    def __init__(self, Chunk chunk not None, int64_t acks, double began, int64_t first_acked_at, int64_t acked_at):
        self.become(chunk)
        self.acks, self.began = acks, began
        self.first_acked_at, self.last_acked_at = first_acked_at, acked_at

    def __dealloc__(self):
        PyMem_Free(self.latencies.numbers)

    def take(self, Chunk chunk not None, int64_t acks, int64_t acked_at):
        if acks != self.acks or self.held.count >= 2 * MAX_SPANS or not self.go_on(chunk):
            return False
        self.last_acked_at = acked_at
        return True

    def sample(self, double latency_s):
        cdef int64_t micros
        if self.latencies.count < MAX_LATENCIES:
            # To the nearest, as Python's round().
            micros = llrint(latency_s * MICROS)
            add_numbers(&self.latencies, &micros, 1)

    @property
    def latency_us(self):
        return [self.latencies.numbers[at] for at in range(self.latencies.count)]


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
        return self.follow(added, most) or self.merge(added, most)

    cdef bint follow(self, list added, size_t most) except -1:
        """Like `take`, where all spans together are one interval behind the others, as mostly; else False."""
        cdef Chunk chunk = added[0][1]
        cdef int64_t low = chunk.held.numbers[0], records = 0
        cdef uint32_t at
        cdef size_t excess
        for _, chunk in added:
            for at in range(0, chunk.held.count, 2):
                low = min(low, chunk.held.numbers[at])
                records += chunk.held.numbers[at + 1]
            # Of each chunk, so that the sum cannot be too large.
            if records > 64 * KP_BITMAP_WORDS:
                return False
        if low < self.last_end():
            return False
        memset(_bitmap, 0, (records + 63) // 64 * sizeof(uint64_t))
        for _, chunk in added:
            if not kp_map_spans(_bitmap, low, records, &chunk.held):
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

    cdef bint merge(self, list added, size_t most) except -1:
        """Like `take`."""
        cdef size_t count = self.count
        cdef uint32_t at
        cdef kp_interval *all
        cdef kp_interval *last
        cdef Chunk chunk
        for _, chunk in added:
            count += chunk.held.count // 2
        all = <kp_interval *>PyMem_Malloc(2 * count * sizeof(kp_interval))
        if all == NULL:
            raise MemoryError
        block = all
        try:
            if self.count:
                memcpy(all, self.all, self.count * sizeof(kp_interval))
            last = all + self.count
            for _, chunk in added:
                for at in range(0, chunk.held.count, 2):
                    last.start = chunk.held.numbers[at]
                    last.end = last.start + chunk.held.numbers[at + 1]
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
