# Read a client's requests and a broker's answers: the twins of kproxy.proxy.request_reader and
# kproxy.proxy.answer_reader. The classes of kproxy.proxy that inherit from them have the methods called here.

cdef extern from *:
    """
    /* As in kproxy.proxy.answer_memory, answer_reader, memory_budget, request_reader; kproxy.runtime.tasks. */
    #define LARGE_BYTES (256 << 10)
    #define LEAST_READ_BYTES 512
    #define LAST_READ_BYTES 4096
    #define TURN_S 0.0005
    #define LARGE_READ_BYTES (64 << 10)
    #define MANY_REQUESTS 32
    #define CLIENT_ID_AT 14
    """
    const Py_ssize_t LARGE_BYTES, LEAST_READ_BYTES, LAST_READ_BYTES, LARGE_READ_BYTES, MANY_REQUESTS, CLIENT_ID_AT
    const double TURN_S


cdef class AnswerReader:
    """See kproxy.proxy.answer_reader.AnswerReader."""

    cdef public bint closed
    cdef public FrameReader _reader
    cdef public AwaitedAnswers _in_flight
    cdef public Outbox _outbox
    cdef public object _share
    # A kproxy.observe.tally.BrokerCounts, and its fields.
    cdef readonly object counts
    cdef kp_traffic *traffic
    cdef double *produce
    cdef double *fetch
    cdef Py_ssize_t longest_read
    cdef Clock clock

    def __init__(self, Py_ssize_t max_answer_bytes, arena, Py_ssize_t longest_read, share, clock, counts):
        self._reader = FrameReader(max_answer_bytes, arena, most_shared=LEAST_READ_BYTES)
        self._share, self.clock, self.counts = share, clock_of(clock), counts
        self.traffic = traffic_of(counts)
        self.produce, self.fetch = histogram_of(counts.produce), histogram_of(counts.fetch)
        self.longest_read = longest_read
        self._in_flight = AwaitedAnswers(self._reader)

    def get_buffer(self, sizehint):
        return self._reader.space(False)

    def buffer_updated(self, Py_ssize_t nbytes):
        cdef uint8_t *data
        cdef Py_ssize_t at, end, size
        cdef int api_key
        cdef double *times
        cdef double began, took
        if self.closed:
            return
        began = self.clock.now()
        self.traffic.received_bytes += nbytes
        try:
            view = self._reader.cut(nbytes)
            data, at, end = self._reader.cut_data, self._reader.cut_start, self._reader.cut_end
            while at < end:
                if self.closed:
                    return
                size = LENGTH_BYTES + kp_int32(data + at)
                ticket = self._in_flight.matching(data + at, size)
                if type(ticket) is CompiledPiece:
                    count_time(self.produce, began - self._in_flight.sent_at)
                    (<CompiledPiece>ticket).take_answer(view, data, at, size, began)
                elif type(ticket) is CompiledRead:
                    count_time(self.fetch, began - self._in_flight.sent_at)
                    (<CompiledRead>ticket).take_answer(view, data, at, size, began)
                else:
                    api_key = ticket.api_key
                    if api_key == PRODUCE_KEY or api_key == FETCH_KEY:
                        times = self.produce if api_key == PRODUCE_KEY else self.fetch
                        count_time(times, began - self._in_flight.sent_at)
                    ticket.answered(view[at:at + size])
                at += size
        except CodecError as error:
            self.distrust(str(error))
            return
        if self._share is not None and self._reader.announced > LARGE_BYTES and not self.closed:
            self._take_in(self._share, nbytes)
        took = self.clock.now() - began
        if took > TURN_S / 2 or nbytes >= self._reader.most_shared:
            self.adjust_reads(nbytes, took)

    cdef int adjust_reads(self, Py_ssize_t nbytes, double took) except -1:
        """Set the size of reads after one of `nbytes`, full or long, whose answers took so many seconds."""
        cdef FrameReader reader = self._reader
        cdef bint is_full = nbytes >= reader.most_shared
        if took > TURN_S / 2:
            reader.most_shared = max(
                LEAST_READ_BYTES, min(<Py_ssize_t>(nbytes * TURN_S / 2 / took), self.longest_read))
        elif took < TURN_S / 4:
            reader.most_shared = min(2 * reader.most_shared, self.longest_read)
        if took > TURN_S or (is_full and took >= TURN_S / 4):
            self._rest()
        return 0

    def next_correlation_id(self):
        return self._in_flight.following_id()

    def hand_over(self, ticket, int32_t correlation_id, uint32_t size):
        self.add_awaited(correlation_id, ticket, size, self.clock.now())

    cdef inline int add_awaited(self, int32_t correlation_id, ticket, uint32_t size, double now) except -1:
        self.traffic.sent_bytes += size
        return self._in_flight.add(correlation_id, ticket, size, now)

    def forward(self, ticket, frame):
        cdef int32_t correlation_id
        if ticket.expects_answer:
            self.forward_span(ticket, frame, 0, len(frame), self.clock.now())
            return
        if len(frame) < KP_CORRELATION_ID_OFFSET + 4:
            raise ValueError(f"a request of {len(frame)} bytes is shorter than its header")
        correlation_id = self._in_flight.following_id()
        kp_put_int32(data_of(frame) + KP_CORRELATION_ID_OFFSET, correlation_id)
        self.send(ticket, correlation_id, [frame])

    cdef int forward_span(self, ticket, view, Py_ssize_t start, Py_ssize_t size, double now) except -1:
        """Like `forward`, for a request in `view` that expects an answer."""
        if size < KP_CORRELATION_ID_OFFSET + 4:
            raise ValueError(f"a request of {size} bytes is shorter than its header")
        cdef int32_t correlation_id = self._in_flight.following_id()
        kp_put_int32(data_of(view) + start + KP_CORRELATION_ID_OFFSET, correlation_id)
        if self._outbox is None:
            self.send(ticket, correlation_id, [view[start:start + size]])
            return 0
        self.add_awaited(correlation_id, ticket, <uint32_t>size, now)
        return self._outbox.put_span(view, start, start + size)


cdef class RequestReader:
    """See kproxy.proxy.request_reader.RequestReader."""

    cdef public bint closed, _reading, _is_let_go
    cdef public FrameReader _reader
    cdef public AnswerOrder _answers
    # A kproxy.proxy.memory_budget.Budget, and its fields.
    cdef readonly object _budget
    cdef kp_budget *numbers
    cdef public object _ranges
    # A deque; None while no request waits.
    cdef public object _backlog
    # A meter; None where no quota applies to the client.
    cdef public object _charging
    # The object that begins requests before `_take` is called, and the same object where it is the plain path itself.
    cdef object taker
    cdef CompiledPath path
    cdef public int64_t _arriving_bytes, _max_bytes, _max_requests
    cdef readonly int64_t received_bytes
    cdef public double _first_byte_at
    # A kproxy.observe.tally.Tally, and its fields.
    cdef object tally
    cdef kp_tally *counts
    cdef Clock clock
    # The use of the client, whose id is `user`, and the sent bytes that it has.
    cdef bint counts_use
    cdef _KnownUse use
    cdef bytes user
    cdef int64_t used_bytes

    def __init__(self, context):
        self.tally, self.clock = context.tally, clock_of(context.clock)
        self.counts = tally_of(self.tally)
        self.counts_use = context.tally.clients is not None
        self._reader = FrameReader(
            context.limits.max_request_bytes, context.arena, most_shared=LARGE_READ_BYTES)
        self._budget = context.budget
        self.numbers = budget_of(self._budget)
        self._max_bytes = context.limits.max_in_flight_bytes
        self._max_requests = context.limits.max_open_requests
        self._reading = True

    @property
    def _plain(self):
        return self.taker

    @_plain.setter
    def _plain(self, taker):
        self.taker = taker
        self.path = taker if type(taker) is CompiledPath else None

    def get_buffer(self, sizehint):
        if self.numbers.held < self.numbers.limit or self._budget.passing is self:
            return self._reader.space(False)
        return self._reader.space(True)[:LAST_READ_BYTES]

    def buffer_updated(self, Py_ssize_t nbytes):
        cdef double now = self.clock.now(), first_byte_at
        cdef uint8_t *data
        cdef Py_ssize_t first, at, end, size, count = 0
        cdef bint has_many
        cdef kp_budget *budget = self.numbers
        cdef FrameReader reader = self._reader
        self.counts.received_bytes += nbytes
        self.received_bytes += nbytes
        first_byte_at = self._first_byte_at if self._arriving_bytes else now
        if self.path is not None:
            self.path.has_looked = False
        try:
            view = reader.cut(nbytes)
            data, first, at, end = reader.cut_data, reader.cut_start, reader.cut_start, reader.cut_end
            self._first_byte_at = now if at < end else first_byte_at
            while at < end:
                size = LENGTH_BYTES + kp_int32(data + at)
                if self.closed:
                    while first < at < end:
                        size = LENGTH_BYTES + kp_int32(data + at)
                        self._wait((view[at:at + size],), now)
                        at += size
                    return
                if self._reading:
                    self.begin(view, data, at, size, now, first_byte_at)
                    if first + size < end and self.clock.now() - now > TURN_S:
                        self._rest()
                else:
                    self._wait((view[at:at + size],), first_byte_at)
                    budget.held += size
                first_byte_at = now
                at += size
                count += 1
            if nbytes >= LARGE_READ_BYTES:
                has_many = count >= MANY_REQUESTS
                reader.most_shared = LARGE_READ_BYTES if has_many else CHUNK_BYTES
                if has_many and self._reading and not self.closed:
                    self._rest()
        except CodecError as error:
            self.refuse(error)
            return
        if self._is_let_go and first < end:
            self._is_let_go = False
            self._budget.leave(self)
        if self._arriving_bytes or reader.end != reader.start:
            self.spend()
        if budget.held >= budget.limit:
            self.adjust_reading()

    @property
    def is_amid_frame(self):
        return self._arriving_bytes > 0

    @property
    def arrived_bytes(self):
        return self._reader.end - self._reader.start

    cdef int spend(self) except -1:
        """Count the arriving frame in the budget."""
        cdef int64_t arriving_bytes = 0 if self.closed else self._reader.held()
        cdef int64_t more = arriving_bytes - self._arriving_bytes
        self.numbers.held += more
        self.numbers.arriving += more
        self._arriving_bytes = arriving_bytes
        return 0

    def _begin(self, frame, double first_byte_at):
        if self.path is not None:
            self.path.has_looked = False
        self.begin(frame, data_of(frame), 0, len(frame), self.clock.now(), first_byte_at)

    cdef int begin(
        self, view, uint8_t *data, Py_ssize_t start, Py_ssize_t size, double now, double first_byte_at
    ) except -1:
        """Begin the request of `size` bytes at `start` of `view`, whose bytes are at `data`."""
        cdef AnswerOrder answers = self._answers
        if self.counts_use:
            self.count_use(data + start, size)
        if self._charging is not None and self._charging.take(view[start:start + size], first_byte_at):
            if self.path is not None:
                self.path.has_looked = False
        elif not self.takes(view, data, start, size, now, first_byte_at):
            self._take(view[start:start + size], first_byte_at)
            if self.path is not None:
                self.path.has_looked = False
        if (
            answers.in_flight_bytes >= self._max_bytes
            or <int64_t>len(answers.slots) + answers.silent >= self._max_requests
        ):
            self.adjust_reading()
        return 0

    cdef int count_use(self, const uint8_t *frame, Py_ssize_t size) except -1:
        """Add a request to the use of its client."""
        cdef Py_ssize_t length = 0
        if size < CLIENT_ID_AT:
            return 0
        length = max(0, kp_int16(frame + CLIENT_ID_AT - 2))
        if CLIENT_ID_AT + length > size:
            return 0
        if (
            self.use is None
            or self.use.fields.is_over
            or PyBytes_GET_SIZE(self.user) != length
            or memcmp(PyBytes_AS_STRING(self.user), frame + CLIENT_ID_AT, length) != 0
        ):
            self.user = PyBytes_FromStringAndSize(<const char *>frame + CLIENT_ID_AT, length)
            self.use = _KnownUse(self._use_of(self.user))
        self.use.fields.requests += 1
        self.use.fields.received_bytes += size
        return self.count_sent(self._answers.outbox)

    cdef int count_sent(self, TimedOutbox outbox) except -1:
        if outbox is not None and self.use is not None:
            self.use.fields.sent_bytes += outbox.written_bytes - self.used_bytes
            self.used_bytes = outbox.written_bytes
        return 0

    def _forget_use(self, TimedOutbox outbox or None):
        if self.use is not None and self.use.fields.is_over:
            self.use = _KnownUse(self._use_of(self.user))
        self.count_sent(outbox)
        self.use = None

    cdef inline bint takes(
        self, view, uint8_t *data, Py_ssize_t start, Py_ssize_t size, double now, double first_byte_at
    ) except -1:
        """Have `_plain` begin the request; False leaves it to `_take`."""
        if self.path is not None:
            return self.path.take_span(view, data, start, size, now, first_byte_at, self._ranges)
        if self.taker is None:
            return False
        return self.taker.take(view[start:start + size], first_byte_at, self._ranges)
