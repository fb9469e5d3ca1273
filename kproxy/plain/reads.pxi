# Serve the reads of a consumer that asks one broker for the same partitions again and again.
#
# The core (kproxy.routing.reads) serves each read that is new. When it has passed a broker's whole answer on, the read is
# known (`learn`), and the next one that differs from it only in offsets is sent to the same broker here. One is in
# flight at a time. The core gets every other read, and before it this one if unanswered, as the core must know all
# reads on its connections. The core gets this one as well if the answer is not a plain one.

cdef extern from "fetch.h" nogil:
    ctypedef struct kp_read_topic:
        uint32_t head_start, head_end, count
    ctypedef struct kp_read:
        uint8_t *frame
        uint32_t size, topics_start, topic_count, entry_count
        int version
        kp_read_topic *topics
        uint32_t *starts
    int kp_reads_again(const uint8_t *frame, uint32_t size, const kp_read *known)
    void kp_read_again(const uint8_t *frame, const kp_read *known, uint8_t *place)
    int kp_has_read(uint8_t *answer, uint32_t size, const kp_read *known)

cdef extern from *:
    """
    #define FETCH_KEY 1
    /* As in kproxy.observe.tally. */
    #define VERSION_BITS 8
    /* As in kproxy.routing.reads. */
    #define LATE_AFTER_S 0.2
    """
    const int FETCH_KEY, VERSION_BITS
    const double LATE_AFTER_S


@cython.final
cdef class _KnownRead:
    """A read that a broker has answered: the request as it was sent there."""

    cdef kp_read read
    cdef bytearray frame
    cdef void *block
    cdef AnswerReader upstream
    cdef int64_t connection, routed_at, answer_bytes
    cdef double wait_s
    # The ranges of versions that have its own.
    cdef object ranges

    def __dealloc__(self):
        PyMem_Free(self.block)

    cdef int keep(self, request) except -1:
        """Copy a request of kproxy_codec.fetch."""
        cdef uint32_t topic_count = len(request.topics), entry_count = request.partition_count, place, at = 0
        cdef size_t starts = entry_count * sizeof(uint32_t)
        self.block = PyMem_Malloc(starts + topic_count * sizeof(kp_read_topic))
        if self.block == NULL:
            raise MemoryError
        self.frame = bytearray(request.frame)
        self.read.frame, self.read.size = <uint8_t *>PyByteArray_AS_STRING(self.frame), len(self.frame)
        self.read.topics_start, self.read.version = request.topics_start, request.header.api_version
        self.read.topic_count, self.read.entry_count = topic_count, entry_count
        self.read.starts = <uint32_t *>self.block
        self.read.topics = <kp_read_topic *>(<char *>self.block + starts)
        for place, topic in enumerate(request.topics):
            self.read.topics[place].head_start, self.read.topics[place].head_end = topic.head_start, topic.head_end
            self.read.topics[place].count = len(topic.starts)
            for start in topic.starts:
                self.read.starts[at] = start
                at += 1
        return 0


@cython.final
cdef class CompiledRead:
    """The ticket of a read, and its record (kproxy.proxy.plain_path.PlainPiece and PlainSlot)."""

    cdef CompiledPath path
    cdef _KnownRead known
    cdef Slot place
    cdef bytearray frame
    cdef int32_t correlation_id
    # Without an answer until `deadline` it is the core's.
    cdef readonly double may_wait_until, deadline
    cdef double until

    api_key = FETCH_KEY
    expects_answer = True
    is_silent = False
    part = None

    @property
    def slot(self):
        return self

    @property
    def upstream(self):
        return self.known.upstream

    @property
    def connection(self):
        return self.known.connection

    @property
    def routed_at(self):
        return self.known.routed_at

    @property
    def sequence(self):
        return self.place.sequence

    @property
    def fill(self):
        return self.place.fill

    @property
    def exchange(self):
        """The read as the core takes it."""
        exchange = self.path.shell.read_of(memoryview(self.frame), self.correlation_id, self.place.sequence)
        exchange.begin_read(self.until, self.known.wait_s)
        return exchange

    def take_out(self):
        """Do nothing: it is a copy."""

    def sent(self):
        """Never called: it has an answer."""

    def unconfirmed(self):
        """Never called, for the same reason."""

    def answered(self, frame):
        """Take the answer, a memoryview; the core gets the read with it if it is not a plain one."""
        self.take_answer(frame, data_of(frame), 0, len(frame), self.path.clock.now())

    def lost(self, *, written):
        self.path.shell.take_over(self).lost(written=written)

    cdef int take_answer(self, view, uint8_t *data, Py_ssize_t start, Py_ssize_t size, double now) except -1:
        """Like `answered`, for a frame in `view`, whose bytes are at `data`."""
        cdef CompiledPath path = self.path
        cdef bint has_moved = path.topology.version != self.known.routed_at
        if has_moved or not kp_has_read(data + start, <uint32_t>size, &self.known.read):
            path.shell.take_over(self).answered(view[start:start + size])
            return 0
        path.is_reading = False
        path.close(self.known.read.entry_count)
        kp_put_int32(data + start + KP_ANSWER_CORRELATION_ID_OFFSET, self.correlation_id)
        return self.place.fill_span(view, start, start + size, now)


cdef bint read_on(CompiledPath path, const uint8_t *data, uint32_t size, double now, ranges) except -1:
    """Send a read that differs from the known one in its offsets; False leaves it to the core."""
    cdef _KnownRead known = path.known_read
    cdef CompiledRead read
    cdef AnswerOrder answers = path.answers
    cdef Slot slot
    cdef int64_t taken
    if path.is_reading or not kp_reads_again(data, size, &known.read):
        return False
    if not (path.is_open if path.has_looked else path.look()) or path.known_read is None:
        return False
    if known.routed_at != path.topology.version or path.shell.claims.connection is not None:
        return False
    if known.upstream.closed or known.upstream._outbox is None or len(known.upstream._in_flight):
        return False
    if ranges is not known.ranges:
        lowest, highest = ranges.get(FETCH_KEY, (1, 0))
        if not lowest <= known.read.version <= highest:
            return False
        known.ranges = ranges
    taken = path.open_partitions + path.core_partitions
    if taken and taken + known.read.entry_count > KP_MAX_PARTITIONS:
        return False
    if path.may_take is not None and not path.may_take():
        return False
    answers.sequence += 1
    slot = Slot(answers, answers.sequence, size, 0.0)
    slot.weight += known.answer_bytes
    answers.slots.append(slot)
    answers.in_flight_bytes += slot.weight
    answers.numbers.held += slot.frame_bytes
    answers.tally.served[FETCH_KEY << VERSION_BITS | known.read.version] += 1
    path.open_count += 1
    if known.read.entry_count > 1:
        path.open_partitions += known.read.entry_count
    path.is_reading = True
    read = CompiledRead.__new__(CompiledRead)
    read.path, read.known, read.place = path, known, slot
    read.correlation_id = kp_int32(data + KP_CORRELATION_ID_OFFSET)
    read.until = now + known.wait_s
    read.may_wait_until = read.until if known.wait_s else 0.0
    read.deadline = read.until + LATE_AFTER_S
    read.frame = PyByteArray_FromStringAndSize(NULL, size)
    kp_read_again(data, &known.read, <uint8_t *>PyByteArray_AS_STRING(read.frame))
    known.upstream.forward_span(read, memoryview(read.frame), 0, size, now)
    return True
