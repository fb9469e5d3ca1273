# Take, send, answer and note produce requests whose routes are all proven.

cdef extern from *:
    """
    /* A larger part is written from the request's own bytes, without a copy. */
    #define MOST_COPIED (8 << 10)
    #define MOST_PLACES 65536
    #define PRODUCE_KEY 0
    /* The number of entries, and of topics, that a slot itself has room for; with more it would leave the sizes that
       Python allocates from its pools. */
    #define FEW 3
    /* Routes and chunks are fetched this many batches before they are needed: of a chunk what each batch changes. */
    #define AHEAD 6
    #define LINE_BYTES 64
    #define HOT 24
    #define HOT_BYTES 100
    #if defined(__GNUC__)
    #define kp_fetch(p) __builtin_prefetch(p)
    #else
    #define kp_fetch(p) ((void)(p))
    #endif
    """
    const uint32_t MOST_COPIED, AHEAD, LINE_BYTES, HOT, HOT_BYTES
    void kp_fetch(const void *p) nogil
    const int MOST_PLACES, PRODUCE_KEY, FEW

# The index of a request before it is known to be plain, and the offsets of an answer's results.
cdef kp_topic _topics[KP_MAX_PARTITIONS]
cdef kp_entry _entries[KP_MAX_PARTITIONS]
cdef uint32_t _results[KP_MAX_PARTITIONS]
cdef uint32_t _parts[KP_MAX_PARTITIONS]
cdef int64_t _connections[KP_MAX_PARTITIONS]
# Of each batch that is noted its OpenChunk, or NULL; their producer, and whether it is that of all.
cdef void *_chunks[KP_MAX_PARTITIONS]
cdef const uint8_t *_producer
cdef bint _is_of_all
cdef void *_found[KP_MAX_PARTITIONS]
cdef uint16_t _sorted_places[KP_MAX_SORTED_INDEX]
_MINUS_INFINITY = float("-inf")


@cython.final
cdef class _Route:
    """The proven route of a partition: where it is sent, and where its acknowledgements are noted (None: nowhere)."""

    cdef AnswerReader upstream
    cdef int64_t connection
    cdef OpenChunk acked
    # The request that named the partition last.
    cdef uint64_t named_by


@cython.final
cdef class CompiledSlot(Slot):
    """The place of one answer, and the record of the request (kproxy.proxy.plain_path.PlainSlot)."""

    cdef CompiledPath path
    cdef readonly double deadline
    cdef readonly int64_t routed_at
    cdef readonly bint is_silent
    cdef object parsed
    # The request is [start, start + head.size) of `view`.
    cdef object view
    cdef Py_ssize_t start
    cdef kp_request head
    cdef kp_topic own_topics[FEW]
    cdef kp_entry own_entries[FEW]
    cdef uint32_t own_places[2 * FEW]
    cdef void *own_chunks[FEW]
    cdef void *block
    cdef kp_topic *topics
    cdef kp_entry *entries
    # The entries by part, and for a split request where their results go in the merged answer.
    cdef uint32_t *chosen
    cdef uint32_t *places
    # Of each entry the OpenChunk of its route, or NULL; `routes`, a list of routes or of such lists, keeps them. Headers
    # of batches are read when they come: after that they are in no cache.
    cdef void **chunks
    cdef uint8_t producer[KP_PRODUCER_BYTES]
    cdef bint is_of_all
    cdef list routes
    cdef bytearray answer
    cdef list done
    cdef uint32_t open_parts

    def __dealloc__(self):
        PyMem_Free(self.block)

    cdef int keep(self, const kp_request *head, uint32_t parts) except -1:
        """Copy the index of the request; it is split where `parts` is more than 1."""
        cdef size_t topics = head.topic_count * sizeof(kp_topic), entries = head.entry_count * sizeof(kp_entry)
        cdef size_t chosen = head.entry_count * sizeof(uint32_t), chunks = head.entry_count * sizeof(void *)
        self.head = head[0]
        if head.topic_count <= FEW and head.entry_count <= FEW:
            self.topics, self.entries = self.own_topics, self.own_entries
            self.chosen, self.places, self.chunks = self.own_places, self.own_places + FEW, self.own_chunks
        else:
            self.block = PyMem_Malloc(chunks + topics + entries + (2 if parts > 1 else 1) * chosen)
            if self.block == NULL:
                raise MemoryError
            self.chunks = <void **>self.block
            self.topics = <kp_topic *>(<char *>self.block + chunks)
            self.entries = <kp_entry *>(<char *>self.topics + topics)
            self.chosen = <uint32_t *>(<char *>self.entries + entries)
            self.places = self.chosen + head.entry_count
        memcpy(self.topics, _topics, topics)
        memcpy(self.entries, _entries, entries)
        memcpy(self.chunks, _chunks, chunks)
        self.is_of_all = _is_of_all
        if _producer != NULL:
            memcpy(self.producer, _producer, KP_PRODUCER_BYTES)
        self.open_parts = parts
        return 0

    cdef object frame(self):
        """The request as it came."""
        return self.view[self.start:self.start + <Py_ssize_t>self.head.size]

    @property
    def request(self):
        """The request as the Python codec reads it, with its client's own correlation_id."""
        if self.parsed is None:
            self.parsed = self.path.parse(self.path.shell, self.frame(), self.head.correlation_id)
        return self.parsed

    @property
    def acks(self):
        return self.head.acks

    @property
    def timeout_ms(self):
        return self.head.timeout_ms

    @property
    def exchange(self):
        """The results so far of a request that is sent in parts; None for one that is sent whole."""
        cdef CompiledPiece piece
        if self.answer is None:
            return None
        exchange = self.path.make_exchange(self.request, self.sequence, self.deadline)
        cdef uint32_t each, result_bytes = kp_result_bytes(self.head.version)
        for piece in self.done:
            results = []
            for each in range(piece.first, piece.first + piece.count):
                start = self.places[self.chosen[each]]
                results.append(bytes(self.answer[start:start + result_bytes]))
            exchange.take_all(piece.part, results)
        return exchange

    def take_out(self):
        """Copy the request out of a much larger receive buffer."""
        if self.parsed is not None:
            self.parsed.take_out()
            self.view, self.start = self.parsed.frame, 0
            return
        buffer = self.view.obj
        if isinstance(buffer, bytearray) and self.head.size < len(buffer) // 2:
            self.view, self.start = memoryview(bytearray(self.frame())), 0

    cdef inline uint8_t *bytes(self):
        return data_of(self.view) + self.start

    cdef inline int put_part(
        self, CompiledPiece piece, int32_t correlation_id, uint8_t *place, uint32_t size
    ) except -1:
        """Write the part of the request for `piece`, which has `size` bytes."""
        kp_part(
            self.bytes(), &self.head, self.topics, self.entries, self.chosen + piece.first, piece.count, correlation_id,
            place, size)
        return 0

    cdef int add_part(self, CompiledPiece piece, int32_t correlation_id, Outbox outbox, uint32_t size) except -1:
        """Like `put_part`, into an outbox: entries are spans of the request, neighbours in one; the rest is copied."""
        cdef const uint8_t *frame = self.bytes()
        cdef uint32_t *chosen = self.chosen + piece.first
        cdef bint flexible = self.head.version >= KP_FLEXIBLE_FROM
        cdef uint32_t at = 0, end, ordinals
        cdef uint8_t text[8]
        cdef uint8_t *head = outbox.add_copy(frame, self.head.topics_start)
        cdef kp_topic *topic
        cdef kp_entry *entry
        kp_put_int32(head, <int32_t>(size - 4))
        kp_put_int32(head + KP_CORRELATION_ID_OFFSET, correlation_id)
        outbox.add_copy(text, kp_put_count(text, kp_topics_of(self.entries, chosen, piece.count), flexible) - text)
        while at < piece.count:
            topic = self.topics + self.entries[chosen[at]].topic
            ordinals = kp_of_one_topic(self.entries, chosen, at, piece.count)
            outbox.add_copy(frame + topic.head_start, topic.name_end - topic.head_start)
            outbox.add_copy(text, kp_put_count(text, ordinals, flexible) - text)
            end = at + ordinals
            while at < end:
                entry = self.entries + chosen[at]
                outbox.add_span(self.view, self.start + entry.start, self.start + entry.end)
                at += 1
            if topic.tail_end > topic.tail_start:
                outbox.add_copy(frame + topic.tail_start, topic.tail_end - topic.tail_start)
        if self.head.size > self.head.topics_end:
            outbox.add_copy(frame + self.head.topics_end, self.head.size - self.head.topics_end)
        return 0

    cdef int note(self, uint32_t first, uint32_t count, const uint8_t *received) except -1:
        """Note the acknowledged entries of a part; `_results` has where they are in the answer."""
        cdef const uint8_t *frame = self.bytes()
        cdef const uint8_t *producer = self.producer
        cdef bint flexible = self.head.version >= KP_FLEXIBLE_FROM
        cdef kp_entry *entry
        cdef OpenChunk acked
        cdef uint32_t at, each, size
        cdef int64_t base_offset
        for at in range(count):
            if at + AHEAD < count:
                each = self.chosen[first + at + AHEAD]
                kp_fetch(<char *>self.chunks[each] + HOT)
                kp_fetch(<char *>self.chunks[each] + HOT + LINE_BYTES)
                kp_fetch(<char *>self.chunks[each] + HOT + HOT_BYTES - 1)
            each = self.chosen[first + at]
            if self.chunks[each] == NULL:
                continue
            acked = <OpenChunk>self.chunks[each]
            entry = self.entries + each
            size = entry.end - flexible - entry.records
            base_offset = kp_int64(received + _results[at] + 6)
            if not self.is_of_all:
                producer = frame + entry.records + KP_PRODUCER_OFFSET
            if not (
                acked.go_on(entry, producer, base_offset, size)
                or acked.begin(self, frame + entry.records, base_offset, size)
            ):
                acked.add(self, self.frame(), entry.records, base_offset, size)
        return 0


@cython.final
@cython.freelist(256)
cdef class CompiledPiece:
    """The ticket of one part of a request (kproxy.proxy.plain_path.PlainPiece)."""

    cdef readonly CompiledSlot slot
    cdef readonly AnswerReader upstream
    cdef readonly int64_t connection
    cdef CompiledPath path
    # Its entries in `slot.chosen`.
    cdef uint32_t first, count
    cdef bint is_whole

    api_key = PRODUCE_KEY
    expects_answer = True
    may_wait_until = _MINUS_INFINITY

    @property
    def sequence(self):
        return self.slot.sequence

    @property
    def part(self):
        """Its selection; None for the whole request."""
        cdef uint32_t each, at
        cdef kp_entry *entry
        if self.is_whole:
            return None
        cdef list selection = [], ordinals = None
        cdef int64_t topic = -1
        for at in range(self.first, self.first + self.count):
            each = self.slot.chosen[at]
            entry = self.slot.entries + each
            if entry.topic != topic:
                topic, ordinals = entry.topic, []
                selection.append((topic, ordinals))
            ordinals.append(each - self.slot.topics[topic].first)
        return selection

    def sent(self):
        """Never called: it has an answer."""

    def unconfirmed(self):
        """Never called, for the same reason."""

    def answered(self, frame):
        """Take the answer, a memoryview; if it is no success, the request goes to the core."""
        self.take_answer(frame, data_of(frame), 0, len(frame), self.path.clock.now())

    def lost(self, *, written):
        self.path.shell.take_over(self).lost(written=written)

    cdef int take_answer(self, view, uint8_t *data, Py_ssize_t start, Py_ssize_t size, double now) except -1:
        """Like `answered`, for a frame in `view`, whose bytes are at `data`."""
        if not self.succeeded(view, data + start, start, size, now):
            self.path.shell.take_over(self).answered(view[start:start + size])
        return 0

    cdef bint succeeded(self, view, uint8_t *received, Py_ssize_t start, Py_ssize_t size, double now) except -1:
        cdef CompiledSlot slot = self.slot
        cdef uint32_t at, result_bytes
        cdef char *answer
        if not is_success(
            slot.bytes(), &slot.head, slot.topics, slot.entries, slot.chosen + self.first, self.count, received,
            <uint32_t>size,
        ):
            return False
        if not slot.is_silent:
            slot.note(self.first, self.count, received)
        if self.is_whole:
            self.path.close(slot.head.entry_count)
            if slot.is_silent:
                slot.order.unload(slot)
                return True
            kp_put_int32(received + KP_ANSWER_CORRELATION_ID_OFFSET, slot.head.correlation_id)
            slot.fill_span(view, start, start + size, now)
            return True
        result_bytes = kp_result_bytes(slot.head.version)
        answer = PyByteArray_AS_STRING(slot.answer)
        for at in range(self.count):
            memcpy(answer + slot.places[slot.chosen[self.first + at]], received + _results[at], result_bytes)
        slot.done.append(self)
        slot.open_parts -= 1
        if not slot.open_parts:
            # Its pieces refer to it: without them its request's buffer is free at once, not at the next collection.
            slot.done = None
            self.path.close(slot.head.entry_count)
            slot.fill([] if slot.is_silent else [slot.answer])
        return True


cdef class CompiledPath:
    """The compiled plain path of one client connection.

    `shell` is its kproxy.proxy.fanout.FanoutShell, `answers` its AnswerOrder. `parse` and `make_exchange` turn a
    request sent here into the objects that the core takes. See kproxy.proxy.plain_path.CompiledPath.
    """

    cdef object routes, counters, topology, acks, upstreams
    # What the gate for all requests looks at (kproxy.proxy.fanout.FanoutShell.gate).
    cdef object core, exchanges, numbered
    cdef dict lanes, refused
    cdef public int64_t open_count, open_partitions
    cdef AnswerOrder answers
    cdef kp_tally *counts
    cdef TopicUses topics
    cdef Clock clock
    cdef object shell, parse, make_exchange
    # A kproxy.proxy.access.ClientAccess: a route is kept, and a transactional id taken, only if the client may write to
    # it; None: to all. No route is kept to a topic in `gated`: it has a writer group.
    cdef object access, gated
    # The last transactional id that the client may write to.
    cdef bytes transactional_id
    # Whether brokers are asked to confirm acks=0.
    cdef bint confirms_silent
    # Tests use it to refuse requests that could be taken.
    cdef public object may_take
    cdef double deadline_cap_ms
    cdef uint64_t serial
    # By topic name and by topic id: for each partition index its _Route, or None.
    cdef dict by_name, by_id
    cdef bytes last_topic
    cdef list last_routes
    cdef bint last_is_id
    # Whether a read is in flight (reads.pxi).
    cdef public bint is_reading
    cdef int64_t generation, places
    # The last ranges looked at, and the versions of Produce in them.
    cdef object ranges
    cdef int64_t lowest, highest
    # Whether the gate for all requests is known, and whether it is open (`look`); then the core's open partitions.
    cdef bint has_looked, is_open
    cdef int64_t core_partitions
    # The last read that was passed on; the next one like it is sent here.
    cdef _KnownRead known_read

    def __init__(self, shell, answers, context, parse, make_exchange):
        self.answers, self.counters = answers, context.counters
        self.core, self.acks = shell.core, shell.acks
        self.lanes, self.refused, self.exchanges, self.numbered = shell.gate
        self.routes, self.upstreams = shell.core.routes, shell.upstreams
        self.access, self.confirms_silent = shell.access, context.confirm_acks0
        self.gated = () if context.own is None else context.own.gated
        self.topology, self.counts = context.topology, tally_of(context.tally)
        self.topics = topic_uses(context)
        self.clock = clock_of(context.clock)
        self.shell, self.parse, self.make_exchange = shell, parse, make_exchange
        self.deadline_cap_ms = context.limits.deadline_cap_ms
        self.forget()

    def forget_routes(self):
        self.forget()

    cdef inline void close(self, uint32_t partitions):
        self.open_count -= 1
        if partitions > 1 and self.open_partitions:
            self.open_partitions -= partitions

    cdef int forget(self) except -1:
        self.by_name, self.by_id, self.last_topic, self.last_routes, self.places = {}, {}, None, None, 0
        self.generation, self.transactional_id, self.known_read = self.routes.generation, None, None
        return 0

    # Routes

    @property
    def kept(self):
        """The topics whose routes are kept, and the partition indexes that they have room for."""
        return len(self.by_name) + len(self.by_id), self.places

    cdef list routes_of(self, const uint8_t *name, uint32_t size, bint is_id):
        """The routes of a topic by partition index."""
        if (
            self.last_topic is not None
            and self.last_is_id == is_id
            and PyBytes_GET_SIZE(self.last_topic) == size
            and memcmp(PyBytes_AS_STRING(self.last_topic), name, size) == 0
        ):
            return self.last_routes
        topic = PyBytes_FromStringAndSize(<const char *>name, size)
        # A list is kept with its first route: a client may name any topics.
        found = (self.by_id if is_id else self.by_name).get(topic, [])
        self.last_topic, self.last_routes, self.last_is_id = topic, found, is_id
        return found

    cdef _Route find(self, list routes, object topic, int32_t partition_index, bint is_id, object frame):
        """The route of a partition, as the core has it; None if it has none."""
        cdef _Route route
        if partition_index >= MOST_PLACES:
            return None
        name = self.topology.name_of(topic) if is_id else topic
        if name is None or name in self.gated:
            return None
        if self.access is not None and not self.access.may_write(name):
            return None
        connection = self.routes.proven_on(name, partition_index)
        if connection is None:
            return None
        if partition_index >= len(routes):
            more = partition_index + 1 - len(routes)
            if self.places + more > MOST_PLACES:
                self.forget()
                return None
            self.places += more
            routes.extend([None] * more)
        route = _Route()
        route.connection = connection
        route.upstream = self.upstreams[connection]
        if self.acks is not None:
            route.acked = self.acks.open_chunk(frame, name, partition_index, route.upstream.owner)
        routes[partition_index] = route
        (self.by_id if is_id else self.by_name)[topic] = routes
        return route

    # Reads

    def learn(self, request, upstream, int64_t connection, int64_t routed_at, double wait_s, int64_t answer_bytes):
        """Keep a read, one of kproxy_codec.fetch, whose answer from this connection is passed on."""
        cdef _KnownRead known = _KnownRead.__new__(_KnownRead)
        known.keep(request)
        known.upstream, known.connection, known.routed_at = upstream, connection, routed_at
        known.wait_s, known.answer_bytes = wait_s, answer_bytes
        self.known_read = known

    def forget_read(self):
        """Let the core serve the next read; return whether one is in flight here, which it must have before."""
        self.known_read = None
        return self.is_reading

    # Requests

    def take(self, frame, double first_byte_at, ranges):
        """Send a request, a memoryview, if it is plain; False leaves it, unchanged, to the core."""
        self.has_looked = False
        return self.take_span(frame, data_of(frame), 0, len(frame), self.clock.now(), first_byte_at, ranges)

    cdef bint look(self) except -1:
        """Check the gate for all requests; only events that Python handles change it."""
        self.has_looked, self.is_open = True, False
        # The core takes plain requests, and all follow the topology: without calls, this is looked at for each read.
        if not self.lanes and not self.refused:
            self.core_partitions = self.exchanges.partitions
            version = self.topology.version
            self.is_open = version == self.core.version and version == self.numbered.version
        if self.routes.generation != self.generation:
            self.forget()
        return self.is_open

    cdef int look_at(self, ranges) except -1:
        """Keep the versions of Produce in `ranges`, which never change: new ranges are another object."""
        versions = ranges.get(PRODUCE_KEY)
        self.lowest, self.highest = (1, 0) if versions is None else versions
        self.ranges = ranges
        return 0

    cdef inline double seconds_to_answer(self, int32_t timeout_ms):
        """See kproxy.routing.retry.deadline_s."""
        cdef double cap_ms = timeout_ms if timeout_ms < self.deadline_cap_ms else self.deadline_cap_ms
        cdef double seconds = 0.9 * cap_ms / 1000
        return seconds if seconds > 1.0 else 1.0

    cdef bint may_transact(self, const uint8_t *data, const kp_request *head) except -1:
        cdef uint32_t size = head.id_end - head.id_start
        cdef const char *transactional_id = <const char *>data + head.id_start
        if (
            self.transactional_id is None
            or PyBytes_GET_SIZE(self.transactional_id) != size
            or memcmp(PyBytes_AS_STRING(self.transactional_id), transactional_id, size) != 0
        ):
            found = PyBytes_FromStringAndSize(transactional_id, size)
            if not self.access.may_transact(found):
                return False
            self.transactional_id = found
        return True

    cdef bint take_span(
        self, view, uint8_t *chunk, Py_ssize_t start, Py_ssize_t size, double now, double first_byte_at, ranges
    ) except -1:
        """Like `take`, for a frame in `view`, whose bytes are at `chunk`; `now` is the time of the event."""
        cdef const uint8_t *data = chunk + start
        cdef kp_request head
        cdef double deadline
        cdef int64_t taken
        cdef uint32_t parts = 0
        if size < 8 or size > 0x7FFFFFFF:
            return False
        if kp_int16(data + 4) == FETCH_KEY:
            return self.known_read is not None and read_on(self, data, <uint32_t>size, now, ranges)
        if kp_int16(data + 4) != PRODUCE_KEY:
            return False
        if not (self.is_open if self.has_looked else self.look()):
            return False
        if not kp_scan(data, <uint32_t>size, &head, _topics, _entries):
            return False
        if not (head.acks == -1 or head.acks == 1 or (head.acks == 0 and self.confirms_silent)):
            return False
        if head.is_transactional and self.access is not None and not self.may_transact(data, &head):
            return False
        if ranges is not self.ranges:
            self.look_at(ranges)
        if not self.lowest <= head.version <= self.highest:
            return False
        # A client that waits for no answer has no timer.
        deadline = (first_byte_at if head.acks else now) + self.seconds_to_answer(head.timeout_ms)
        if deadline <= now:
            return False
        taken = self.open_partitions + self.core_partitions
        if taken and taken + head.entry_count > KP_MAX_PARTITIONS:
            return False
        kept = self.find_all(&head, data, view, start, &parts)
        if kept is None or (self.may_take is not None and not self.may_take()):
            return False
        self.send(view, start, now, first_byte_at, deadline, &head, kept, parts)
        return True

    cdef list find_all(
        self, const kp_request *head, const uint8_t *data, view, Py_ssize_t start, uint32_t *parts
    ):
        """Find the route of each entry, and its part: `_found`, `_chunks`, `_parts`. Return what keeps the routes.

        None if an entry has no route, or a partition is named twice. The headers of noted batches are read: `_producer`.
        """
        global _producer, _is_of_all
        cdef const uint8_t *producer
        cdef list kept = None, routes
        cdef _Route route
        cdef kp_topic *topic
        cdef bint is_id = head.version >= KP_TOPIC_IDS_FROM
        cdef uint32_t place, at, part, part_count = 0
        cdef int32_t index
        self.serial += 1
        _producer, _is_of_all = NULL, True
        for place in range(head.topic_count):
            topic = _topics + place
            routes = self.routes_of(data + topic.name_start, topic.name_end - topic.name_start, is_id)
            # Routes stay in their list; it is one in nearly all requests.
            if head.topic_count == 1:
                kept = routes
            elif kept is None:
                kept = [routes]
            else:
                kept.append(routes)
            for at in range(topic.first, topic.first + topic.count):
                if at + AHEAD < topic.first + topic.count:
                    index = _entries[at + AHEAD].partition_index
                    if index < PyList_GET_SIZE(routes):
                        kp_fetch(PyList_GET_ITEM(routes, index))
                index = _entries[at].partition_index
                route = <_Route>routes[index] if index < len(routes) else None
                if route is None:
                    frame = view[start:start + <Py_ssize_t>head.size]
                    route = self.find(routes, self.last_topic, index, is_id, frame)
                    if route is None:
                        return None
                if route.named_by == self.serial:
                    return None
                route.named_by = self.serial
                part = 0
                while part < part_count and _connections[part] != route.connection:
                    part += 1
                if part == part_count:
                    _connections[part] = route.connection
                    part_count += 1
                _parts[at] = part
                if route.acked is None or not kp_read_batch(data, head.version >= KP_FLEXIBLE_FROM, _entries + at):
                    _chunks[at] = NULL
                else:
                    _chunks[at] = <void *>route.acked
                    producer = data + _entries[at].records + KP_PRODUCER_OFFSET
                    if _producer == NULL:
                        _producer = producer
                    elif memcmp(producer, _producer, KP_PRODUCER_BYTES) != 0:
                        _is_of_all = False
                _found[at] = <void *>route
        parts[0] = part_count
        return kept

    cdef int send(
        self, view, Py_ssize_t start, double now, double began, double deadline, const kp_request *head, list kept,
        uint32_t parts,
    ) except -1:
        cdef CompiledSlot slot = CompiledSlot.__new__(CompiledSlot)
        cdef CompiledPiece piece
        cdef AnswerOrder answers = self.answers
        cdef uint32_t count = head.entry_count, part, at, first, answer_bytes
        slot.keep(head, parts)
        slot.path, slot.view, slot.start, slot.routes = self, view, start, kept
        slot.began, slot.taken_at, slot.sent_at, slot.deadline = began, now, now, deadline
        slot.routed_at = self.topology.version
        slot.weight = slot.frame_bytes = head.size
        slot.order = answers
        answers.sequence += 1
        slot.sequence = answers.sequence
        if head.acks:
            answers.slots.append(slot)
        else:
            # The client gets no answer; the broker is asked for one.
            answers.silent += 1
            slot.is_silent, slot.head.acks = True, 1
            kp_put_int16(slot.bytes() + head.topics_start - KP_ACKS_BEFORE_TOPICS, 1)
        answers.in_flight_bytes += slot.weight
        answers.numbers.held += slot.frame_bytes
        self.counts.produces[head.version] += 1
        if self.topics is not None:
            self.topics.add(slot)
        self.open_count += 1
        if count > 1:
            self.open_partitions += count
        if parts == 1:
            for at in range(count):
                slot.chosen[at] = at
            piece = self.piece(slot, 0, count, True)
            piece.upstream.forward_span(piece, view, start, head.size, now)
            return 0
        self.counters["splits"] += 1
        answer_bytes = answer_bytes_of_all(slot, count)
        slot.answer = PyByteArray_FromStringAndSize(NULL, answer_bytes)
        slot.done = []
        kp_put_answer(
            slot.bytes(), &slot.head, slot.topics, <uint8_t *>PyByteArray_AS_STRING(slot.answer), answer_bytes,
            slot.places)
        at = 0
        pieces = []
        for part in range(parts):
            first = at
            for each in range(count):
                if _parts[each] == part:
                    slot.chosen[at] = each
                    at += 1
            pieces.append(self.piece(slot, first, at - first, False))
        for piece in pieces:
            self.send_part(slot, piece, now)
        return 0

    cdef CompiledPiece piece(self, CompiledSlot slot, uint32_t first, uint32_t count, bint is_whole):
        cdef CompiledPiece piece = CompiledPiece.__new__(CompiledPiece)
        cdef _Route route = <_Route>_found[slot.chosen[first]]
        piece.path, piece.slot, piece.first, piece.count, piece.is_whole = self, slot, first, count, is_whole
        piece.upstream, piece.connection = route.upstream, route.connection
        return piece

    cdef int send_part(self, CompiledSlot slot, CompiledPiece piece, double now) except -1:
        cdef uint32_t *chosen = slot.chosen + piece.first
        cdef uint32_t size = kp_part_bytes(&slot.head, slot.topics, slot.entries, chosen, piece.count)
        cdef int32_t correlation_id = piece.upstream._in_flight.following_id()
        cdef Outbox outbox = piece.upstream._outbox
        cdef bytearray part
        if outbox is None:
            part = PyByteArray_FromStringAndSize(NULL, size)
            slot.put_part(piece, correlation_id, <uint8_t *>PyByteArray_AS_STRING(part), size)
            piece.upstream.send(piece, correlation_id, [part])
            return 0
        piece.upstream.add_awaited(correlation_id, piece, size, now)
        if size <= MOST_COPIED:
            slot.put_part(piece, correlation_id, outbox.place(size), size)
            return outbox.placed(size)
        slot.add_part(piece, correlation_id, outbox, size)
        return outbox.count(size)


cdef uint32_t answer_bytes_of_all(CompiledSlot slot, uint32_t count):
    cdef uint32_t at
    for at in range(count):
        slot.chosen[at] = at
    return kp_answer_bytes(&slot.head, slot.topics, slot.entries, slot.chosen, count)


