# Note the acknowledged batches of a client and partition: the twin of the open chunk of kproxy.trail.acknowledgements.

cdef extern from *:
    """
    /* As in kproxy.trail.acknowledgements. */
    #define MOST_FINISHED 499
    #define ONE_BATCH (1LL << 48)
    #define MOST_OFFSET (1LL << 62)
    #define MAGIC 2
    #define LEAST_ROOM 64
    """
    const int64_t ONE_BATCH, MOST_OFFSET
    const uint32_t MOST_FINISHED, LEAST_ROOM
    const int MAGIC


cdef class OpenChunk:
    """The open chunk of `kproxy.trail.acknowledgements.Acked`, which explains the attributes.

    A request of many partitions finds its chunks in no cache, so what each batch needs is together, and is in one place
    with its producer.
    """

    cdef public int64_t next_sequence, next_offset, first_offset
    cdef int64_t size, batches
    # The finished spans, the sum of their records, and whether one has none.
    cdef kp_spans held
    cdef int64_t records
    # Its own producer id and epoch as a header has them; none while no chunk is open.
    cdef uint8_t own_producer[KP_PRODUCER_BYTES]
    cdef uint8_t has_producer, has_empty, is_counted
    cdef public bint is_idle
    cdef uint32_t wanted_room
    cdef public int64_t first_sequence, acks, unread
    cdef public double latency_s
    cdef public list woken, chunks
    cdef public object key, origin, partition, row
    cdef public Py_ssize_t place

    def __init__(self, key, origin, list woken):
        self.key, self.origin, self.woken = key, origin, woken
        self.is_idle, self.wanted_room = True, LEAST_ROOM

    def __dealloc__(self):
        PyMem_Free(self.held.bytes)

    @property
    def counts_sequences(self):
        return bool(self.is_counted)

    @counts_sequences.setter
    def counts_sequences(self, bint counts):
        self.is_counted = counts

    @property
    def volume(self):
        return self.size + ONE_BATCH * self.batches

    @volume.setter
    def volume(self, value):
        self.batches, self.size = divmod(value, ONE_BATCH)

    @property
    def producer(self):
        return PyBytes_FromStringAndSize(<const char *>self.own_producer, KP_PRODUCER_BYTES if self.has_producer else 0)

    @producer.setter
    def producer(self, bytes producer):
        self.has_producer = PyBytes_GET_SIZE(producer) == KP_PRODUCER_BYTES
        if self.has_producer:
            memcpy(self.own_producer, PyBytes_AS_STRING(producer), KP_PRODUCER_BYTES)

    @property
    def spans(self):
        return array_of(&self.held)

    @spans.setter
    def spans(self, array spans):
        cdef Py_ssize_t at
        set_spans(&self.held, spans)
        self.records, self.has_empty = 0, False
        for at in range(1, len(spans), 2):
            self.count(spans[at])

    cdef inline void count(self, int64_t records):
        self.records += records
        self.has_empty |= records <= 0

    cdef inline int put_span(self) except -1:
        cdef int64_t records = self.next_offset - self.first_offset
        if self.held.room - self.held.size < KP_SPAN_BYTES:
            # The next chunk is likely to need as much as the last one.
            set_room(&self.held, 2 * self.held.room if self.held.room else self.wanted_room)
        kp_put_span(&self.held, self.first_offset, records)
        self.count(records)
        return 0

    def add_span(self):
        self.put_span()

    def is_full(self):
        return self.held.count >= MOST_FINISHED

    def finish(self):
        self.close()

    cdef inline int close(self) except -1:
        """See kproxy.trail.acknowledgements._OpenChunk.finish."""
        cdef Chunk chunk
        if not self.batches or not self.has_producer:
            return 0
        self.put_span()
        self.wanted_room = max(LEAST_ROOM, self.held.size + KP_SPAN_BYTES)
        if self.has_empty:
            self.unread += self.batches
            PyMem_Free(self.held.bytes)
        else:
            # It may have grown by many steps.
            set_room(&self.held, self.held.size)
            chunk = Chunk.__new__(Chunk)
            chunk.producer_id, chunk.producer_epoch = kp_int64(self.own_producer), kp_int16(self.own_producer + 8)
            chunk.record_count = self.records
            chunk.begin(self.first_sequence if self.is_counted else NO_SEQUENCE)
            chunk.held = self.held
            chunk.batches, chunk.bytes = self.batches, self.size
            if self.chunks is None:
                self.chunks = []
            self.chunks.append(chunk)
        memset(&self.held, 0, sizeof(self.held))
        self.has_producer, self.batches, self.size, self.records, self.has_empty = False, 0, 0, 0, False
        return 0

    def take(self):
        """See kproxy.trail.acknowledgements._OpenChunk.take."""
        self.close()
        self.is_idle = True
        chunks, self.chunks = self.chunks, None
        return () if chunks is None else chunks

    cdef bint begin(
        self, CompiledSlot slot, const uint8_t *header, int64_t base_offset, int64_t size
    ) except -1:
        """Take the first batch since the last look; False if it is not, or is unreadable."""
        cdef int64_t delta = kp_int32(header + KP_DELTA_OFFSET)
        if not self.is_idle or base_offset < 0 or base_offset > MOST_OFFSET or header[16] != MAGIC or delta < 0:
            return False
        self.is_idle = False
        self.woken.append(self)
        self.acks = slot.head.acks
        # As Trail.seconds_since computes it, to the last bit.
        self.latency_s = slot.path.clock.now() - slot.deadline + slot.path.seconds_to_answer(slot.head.timeout_ms)
        memcpy(self.own_producer, header + KP_PRODUCER_OFFSET, KP_PRODUCER_BYTES)
        self.has_producer = True
        self.is_counted = kp_int64(header + KP_PRODUCER_OFFSET) != -1
        self.first_sequence = self.next_sequence = kp_int32(header + KP_SEQUENCE_OFFSET)
        if self.is_counted:
            self.next_sequence += delta + 1
        self.first_offset = base_offset
        self.next_offset = base_offset + delta + 1
        self.batches, self.size = 1, size
        return True

    cdef inline bint go_on(
        self, const kp_entry *entry, const uint8_t *producer, int64_t base_offset, int64_t size
    ) except -1:
        """Take a batch that continues the chunk; False if it does not."""
        cdef int64_t count, sequence = entry.base_sequence
        if sequence != self.next_sequence or not self.has_producer:
            return False
        if memcmp(producer, self.own_producer, KP_PRODUCER_BYTES) != 0:
            return False
        count = <int64_t>entry.last_offset_delta + 1
        if base_offset != self.next_offset:
            if <uint64_t>base_offset > <uint64_t>MOST_OFFSET or self.held.count >= MOST_FINISHED:
                return False
            self.put_span()
            self.first_offset = base_offset
        self.next_offset = base_offset + count
        if self.is_counted:
            self.next_sequence = sequence + count
        self.size += size
        self.batches += 1
        return True
