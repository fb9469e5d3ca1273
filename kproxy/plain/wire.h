/* Read produce requests and their answers, versions 3 to 13, without Python.
 *
 * `kp_scan` indexes a request; `kp_is_success` compares an answer with the one expected, and `kp_sort` puts one in another
 * order into that of its request; `kp_part_bytes` and `kp_part` encode a part of a request. All of them are conservative:
 * a frame with anything unusual is left to the Python codec (kproxy_codec.produce), which decides whether it is valid. A
 * frame that is accepted here has the same spans there.
 *
 * No pointer is followed beyond the lengths given; no length from the wire is added before it is compared with the rest
 * of the frame. Offsets count from the start of the frame, with its 4-byte length prefix. kproxy_codec.produce has the
 * layouts.
 */
#ifndef KPROXY_PLAIN_WIRE_H
#define KPROXY_PLAIN_WIRE_H

#include <stdint.h>
#include <string.h>

enum {
    KP_MAX_PARTITIONS = 4096,    /* of one request, and as many topics */
    KP_MIN_VERSION = 3,
    KP_MAX_VERSION = 13,
    KP_FLEXIBLE_FROM = 9,
    KP_TOPIC_IDS_FROM = 13,
    KP_TOPIC_ID_BYTES = 16,
    KP_CORRELATION_ID_OFFSET = 8,
    KP_ACKS_BEFORE_TOPICS = 6,   /* acks, and timeout_ms behind it */
    KP_ANSWER_CORRELATION_ID_OFFSET = 4,
    KP_MAX_SORTED_TOPICS = 256,  /* of an answer that is put in order, as in kproxy_codec.partitioned */
    KP_MAX_SORTED_INDEX = 65536  /* its partition indexes are below */
};

typedef struct {
    uint32_t head_start, name_start, name_end;  /* the encoded name is [head_start, name_end) */
    uint32_t first, count;                      /* its entries */
    uint32_t tail_start, tail_end;              /* its tagged fields */
} kp_topic;

typedef struct {
    uint32_t start, end;      /* the whole entry */
    uint32_t records;         /* where its records begin */
    uint32_t topic;           /* the topic's place */
    int32_t partition_index;
    int32_t last_offset_delta, base_sequence;  /* of its batch, where it is noted: kp_read_batch */
} kp_entry;

typedef struct {
    uint32_t size;                        /* of the frame */
    uint32_t topics_start, topics_end;    /* the topics array, its count included */
    uint32_t topic_count, entry_count;
    int32_t correlation_id, timeout_ms;
    int16_t version, acks;
    int is_transactional;
    uint32_t id_start, id_end;            /* the transactional_id */
} kp_request;

static inline int16_t kp_int16(const uint8_t *p) { return (int16_t)((uint16_t)p[0] << 8 | p[1]); }
static inline int32_t kp_int32(const uint8_t *p) {
    return (int32_t)((uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3]);
}
static inline int64_t kp_int64(const uint8_t *p) {
    return (int64_t)((uint64_t)(uint32_t)kp_int32(p) << 32 | (uint32_t)kp_int32(p + 4));
}
static inline void kp_put_int16(uint8_t *p, int16_t value) {
    p[0] = (uint8_t)((uint16_t)value >> 8); p[1] = (uint8_t)value;
}
static inline void kp_put_int32(uint8_t *p, int32_t value) {
    uint32_t v = (uint32_t)value;
    p[0] = (uint8_t)(v >> 24); p[1] = (uint8_t)(v >> 16); p[2] = (uint8_t)(v >> 8); p[3] = (uint8_t)v;
}

/* Read an unsigned varint in its shortest form; return 0 if there is none before `size`. */
static inline int kp_uvarint(const uint8_t *frame, uint32_t size, uint32_t *offset, uint32_t *value) {
    uint32_t result = 0, at = *offset;
    for (unsigned shift = 0; shift < 35; shift += 7) {
        if (at >= size) return 0;
        uint8_t byte = frame[at++];
        if (shift == 28 && byte > 0x0F) return 0;
        result |= (uint32_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            if (byte == 0 && shift) return 0;
            *offset = at;
            *value = result;
            return 1;
        }
    }
    return 0;
}

static inline uint32_t kp_uvarint_bytes(uint32_t value) {
    uint32_t bytes = 1;
    while (value >= 0x80) { value >>= 7; bytes++; }
    return bytes;
}

static inline uint8_t *kp_put_uvarint(uint8_t *p, uint32_t value) {
    while (value >= 0x80) { *p++ = (uint8_t)(value | 0x80); value >>= 7; }
    *p++ = (uint8_t)value;
    return p;
}

/* An array's length: compact (plus one) or INT32. */
static inline uint32_t kp_count_bytes(uint32_t count, int flexible) { return flexible ? kp_uvarint_bytes(count + 1) : 4; }
static inline uint8_t *kp_put_count(uint8_t *p, uint32_t count, int flexible) {
    if (flexible) return kp_put_uvarint(p, count + 1);
    kp_put_int32(p, (int32_t)count);
    return p + 4;
}

/* Read the length of a non-empty array; return 0 if it is anything else. */
static inline int kp_count(const uint8_t *frame, uint32_t size, uint32_t *offset, int flexible, uint32_t *count) {
    if (flexible) {
        if (!kp_uvarint(frame, size, offset, count) || *count < 2) return 0;
        *count -= 1;
    } else {
        if (size - *offset < 4) return 0;
        int32_t value = kp_int32(frame + *offset);
        if (value < 1) return 0;
        *count = (uint32_t)value;
        *offset += 4;
    }
    return *count <= KP_MAX_PARTITIONS;
}

/* Index a whole produce request of `size` bytes into arrays of KP_MAX_PARTITIONS topics and entries.
 * Return 1 if it has the usual form; 0 leaves it to the Python codec. acks and repeated partitions are not checked. */
static inline int kp_scan(const uint8_t *frame, uint32_t size, kp_request *request, kp_topic *topics, kp_entry *entries) {
    uint32_t offset = 14, length, count, entry_count = 0;
    if (size < 14 || size > INT32_MAX || kp_int32(frame) != (int32_t)(size - 4) || kp_int16(frame + 4) != 0) return 0;
    int version = kp_int16(frame + 6);
    if (version < KP_MIN_VERSION || version > KP_MAX_VERSION) return 0;
    int flexible = version >= KP_FLEXIBLE_FROM, by_id = version >= KP_TOPIC_IDS_FROM;
    int16_t client_id = kp_int16(frame + 12);
    if (client_id < -1) return 0;
    if (client_id > 0) {
        if ((uint32_t)client_id > size - offset) return 0;
        offset += (uint32_t)(uint16_t)client_id;
    }
    /* No tagged field of the header; then the transactional_id. */
    if (flexible) {
        if (offset >= size || frame[offset++] != 0) return 0;
        if (!kp_uvarint(frame, size, &offset, &length)) return 0;
        request->is_transactional = length > 0;
        request->id_start = offset;
        if (length) {
            if (length - 1 > size - offset) return 0;
            offset += length - 1;
        }
    } else {
        if (size - offset < 2) return 0;
        int16_t transactional_id = kp_int16(frame + offset);
        offset += 2;
        if (transactional_id < -1) return 0;
        request->is_transactional = transactional_id >= 0;
        request->id_start = offset;
        if (transactional_id > 0) {
            if ((uint32_t)transactional_id > size - offset) return 0;
            offset += (uint32_t)(uint16_t)transactional_id;
        }
    }
    request->id_end = offset;
    if (size - offset < KP_ACKS_BEFORE_TOPICS) return 0;
    request->version = (int16_t)version;
    request->correlation_id = kp_int32(frame + KP_CORRELATION_ID_OFFSET);
    request->acks = kp_int16(frame + offset);
    request->timeout_ms = kp_int32(frame + offset + 2);
    request->size = size;
    request->topics_start = offset += KP_ACKS_BEFORE_TOPICS;
    if (!kp_count(frame, size, &offset, flexible, &request->topic_count)) return 0;
    for (uint32_t place = 0; place < request->topic_count; place++) {
        kp_topic *topic = topics + place;
        topic->head_start = offset;
        if (by_id) {
            length = KP_TOPIC_ID_BYTES;
        } else if (flexible) {
            if (!kp_uvarint(frame, size, &offset, &length) || length < 2) return 0;
            length -= 1;
        } else {
            if (size - offset < 2) return 0;
            int16_t name_bytes = kp_int16(frame + offset);
            if (name_bytes < 1) return 0;
            length = (uint32_t)name_bytes;
            offset += 2;
        }
        if (length > size - offset) return 0;
        topic->name_start = offset;
        topic->name_end = offset += length;
        if (!by_id)
            for (uint32_t at = topic->name_start; at < topic->name_end; at++)
                if (frame[at] >= 0x80) return 0;
        if (!kp_count(frame, size, &offset, flexible, &count) || count > KP_MAX_PARTITIONS - entry_count) return 0;
        topic->first = entry_count;
        topic->count = count;
        for (uint32_t ordinal = 0; ordinal < count; ordinal++) {
            kp_entry *entry = entries + entry_count++;
            if (size - offset < 5) return 0;
            entry->start = offset;
            entry->topic = place;
            entry->partition_index = kp_int32(frame + offset);
            if (entry->partition_index < 0) return 0;
            offset += 4;
            if (flexible) {
                if (!kp_uvarint(frame, size, &offset, &length) || length < 2) return 0;
                length -= 1;
            } else {
                if (size - offset < 4) return 0;
                int32_t records_bytes = kp_int32(frame + offset);
                if (records_bytes < 1) return 0;
                length = (uint32_t)records_bytes;
                offset += 4;
            }
            if (length > size - offset) return 0;
            entry->records = offset;
            offset += length;
            /* No tagged field of the entry. */
            if (flexible && (offset >= size || frame[offset++] != 0)) return 0;
            entry->end = offset;
        }
        topic->tail_start = offset;
        if (flexible && (offset >= size || frame[offset++] != 0)) return 0;
        topic->tail_end = offset;
    }
    request->topics_end = offset;
    if (flexible && (offset >= size || frame[offset++] != 0)) return 0;
    request->entry_count = entry_count;
    return offset == size;
}

/* The header of a batch: last_offset_delta, producer_id and producer_epoch together, base_sequence. */
enum { KP_BATCH_BYTES = 61, KP_DELTA_OFFSET = 23, KP_PRODUCER_OFFSET = 43, KP_PRODUCER_BYTES = 10, KP_SEQUENCE_OFFSET = 53 };

/* Read the header of the entry's batch; return 0 if there is none. An entry may be as short as one without records. */
static inline int kp_read_batch(const uint8_t *frame, int flexible, kp_entry *entry) {
    if (entry->end - entry->start < 8 + KP_BATCH_BYTES) return 0;
    if (entry->end - (uint32_t)flexible - entry->records < KP_BATCH_BYTES) return 0;
    entry->last_offset_delta = kp_int32(frame + entry->records + KP_DELTA_OFFSET);
    entry->base_sequence = kp_int32(frame + entry->records + KP_SEQUENCE_OFFSET);
    return 1;
}

/* An entry of a successful answer: index, error_code, offsets and times, and the bytes that end it. */
static inline uint32_t kp_offsets_bytes(int version) { return version >= 5 ? 24 : 16; }
static inline uint32_t kp_end_bytes(int version) { return version >= KP_FLEXIBLE_FROM ? 3 : version == 8 ? 6 : 0; }
static inline uint32_t kp_result_bytes(int version) { return 6 + kp_offsets_bytes(version) + kp_end_bytes(version); }

static inline int kp_is_end(const uint8_t *p, int version) {
    static const uint8_t flexible[3] = {1, 0, 0}, eighth[6] = {0, 0, 0, 0, 0xFF, 0xFF};
    if (version >= KP_FLEXIBLE_FROM) return memcmp(p, flexible, sizeof flexible) == 0;
    return version != 8 || memcmp(p, eighth, sizeof eighth) == 0;
}

/* How many of the `count` entries selected by `chosen`, from the place `from` on, are of one topic. */
static inline uint32_t kp_of_one_topic(const kp_entry *entries, const uint32_t *chosen, uint32_t from, uint32_t count) {
    uint32_t topic = entries[chosen[from]].topic, end = from + 1;
    while (end < count && entries[chosen[end]].topic == topic) end++;
    return end - from;
}

static inline uint32_t kp_topics_of(const kp_entry *entries, const uint32_t *chosen, uint32_t count) {
    uint32_t topics = 0;
    for (uint32_t at = 0; at < count; topics++) at += kp_of_one_topic(entries, chosen, at, count);
    return topics;
}

static inline uint32_t kp_head_bytes(const kp_topic *topic) { return topic->name_end - topic->head_start; }

/* The size of a successful answer for the chosen entries. */
static inline uint32_t kp_answer_bytes(
    const kp_request *request, const kp_topic *topics, const kp_entry *entries, const uint32_t *chosen, uint32_t count
) {
    int flexible = request->version >= KP_FLEXIBLE_FROM;
    uint32_t bytes = 8 + (uint32_t)flexible + kp_count_bytes(kp_topics_of(entries, chosen, count), flexible);
    for (uint32_t at = 0; at < count;) {
        uint32_t ordinals = kp_of_one_topic(entries, chosen, at, count);
        bytes += kp_head_bytes(topics + entries[chosen[at]].topic) + kp_count_bytes(ordinals, flexible);
        bytes += ordinals * kp_result_bytes(request->version) + (uint32_t)flexible;
        at += ordinals;
    }
    return bytes + 4 + (uint32_t)flexible;
}

/* Whether an answer reports success for exactly the chosen entries of the request `frame`, in this order, and nothing
 * else: no throttling, no tagged field. `results` gets the offset of each entry in the answer. */
static inline int kp_is_success(
    const uint8_t *frame, const kp_request *request, const kp_topic *topics, const kp_entry *entries,
    const uint32_t *chosen, uint32_t count, const uint8_t *answer, uint32_t size, uint32_t *results
) {
    int version = request->version, flexible = version >= KP_FLEXIBLE_FROM;
    uint32_t offsets_bytes = kp_offsets_bytes(version), end_bytes = kp_end_bytes(version);
    uint8_t text[8], *text_end;
    if (size != kp_answer_bytes(request, topics, entries, chosen, count)) return 0;
    /* From here on every offset is within the answer: its size is that of the expected one. */
    uint32_t offset = 8;
    if (flexible && answer[offset++] != 0) return 0;
    text_end = kp_put_count(text, kp_topics_of(entries, chosen, count), flexible);
    if (memcmp(answer + offset, text, (size_t)(text_end - text)) != 0) return 0;
    offset += (uint32_t)(text_end - text);
    for (uint32_t at = 0; at < count;) {
        const kp_topic *topic = topics + entries[chosen[at]].topic;
        uint32_t ordinals = kp_of_one_topic(entries, chosen, at, count), head_bytes = kp_head_bytes(topic);
        if (memcmp(answer + offset, frame + topic->head_start, head_bytes) != 0) return 0;
        offset += head_bytes;
        text_end = kp_put_count(text, ordinals, flexible);
        if (memcmp(answer + offset, text, (size_t)(text_end - text)) != 0) return 0;
        offset += (uint32_t)(text_end - text);
        for (uint32_t end = at + ordinals; at < end; at++) {
            if (kp_int32(answer + offset) != entries[chosen[at]].partition_index) return 0;
            if (kp_int16(answer + offset + 4) != 0) return 0;
            results[at] = offset;
            offset += 6 + offsets_bytes;
            if (!kp_is_end(answer + offset, version)) return 0;
            offset += end_bytes;
        }
        if (flexible && answer[offset++] != 0) return 0;
    }
    if (kp_int32(answer + offset) != 0) return 0;
    return !flexible || answer[offset + 4] == 0;
}

/* Put a successful answer for the chosen entries in any order into their order: a broker of Apache Kafka answers in the
 * order of its hash tables. Return 0, and leave the answer as it is, if it is not one. `spare` has `size` bytes;
 * `places` has KP_MAX_SORTED_INDEX zeros, and has them again afterwards. `results` as in kp_is_success. */
static inline int kp_sort(
    const uint8_t *frame, const kp_request *request, const kp_topic *topics, const kp_entry *entries,
    const uint32_t *chosen, uint32_t count, uint8_t *answer, uint32_t size, uint8_t *spare, uint16_t *places,
    uint32_t *results
) {
    int flexible = request->version >= KP_FLEXIBLE_FROM, fits = 1;
    uint32_t result_bytes = kp_result_bytes(request->version), topic_count = kp_topics_of(entries, chosen, count);
    uint32_t tail = 4 + (uint32_t)flexible, first = 8 + (uint32_t)flexible + kp_count_bytes(topic_count, flexible);
    if (topic_count > KP_MAX_SORTED_TOPICS || size != kp_answer_bytes(request, topics, entries, chosen, count)) return 0;
    /* A result that is not written has an error code, so it is no success. */
    memset(spare, 0xFF, size);
    memcpy(spare, answer, first);
    memcpy(spare + size - tail, answer + size - tail, tail);
    for (uint32_t from = first, number = 0; number < topic_count; number++) {
        uint32_t to = first, at = 0, ordinals = 0, head_bytes = 0;
        for (; at < count; at += ordinals) {
            const kp_topic *topic = topics + entries[chosen[at]].topic;
            uint32_t name_bytes = kp_head_bytes(topic);
            ordinals = kp_of_one_topic(entries, chosen, at, count);
            head_bytes = name_bytes + kp_count_bytes(ordinals, flexible);
            if (name_bytes <= size - from && memcmp(answer + from, frame + topic->head_start, name_bytes) == 0) break;
            to += head_bytes + ordinals * result_bytes + (uint32_t)flexible;
        }
        if (at >= count || head_bytes + ordinals * result_bytes + (uint32_t)flexible > size - tail - from) return 0;
        memcpy(spare + to, answer + from, head_bytes);
        from += head_bytes;
        to += head_bytes;
        for (uint32_t place = 0; place < ordinals; place++) {
            uint32_t index = (uint32_t)entries[chosen[at + place]].partition_index;
            if (index >= KP_MAX_SORTED_INDEX) fits = 0;
            else places[index] = (uint16_t)(place + 1);
        }
        for (uint32_t place = 0; place < ordinals; place++, from += result_bytes) {
            uint32_t index = (uint32_t)kp_int32(answer + from);
            if (index >= KP_MAX_SORTED_INDEX || places[index] == 0) fits = 0;
            else memcpy(spare + to + (places[index] - 1u) * result_bytes, answer + from, result_bytes);
        }
        for (uint32_t place = 0; place < ordinals; place++) {
            uint32_t index = (uint32_t)entries[chosen[at + place]].partition_index;
            if (index < KP_MAX_SORTED_INDEX) places[index] = 0;
        }
        if (!fits) return 0;
        if (flexible) spare[to + ordinals * result_bytes] = answer[from++];
    }
    if (!kp_is_success(frame, request, topics, entries, chosen, count, spare, size, results)) return 0;
    memcpy(answer, spare, size);
    return 1;
}

/* Write a successful answer to the whole request, except its results; `results` gets the offset of each entry. */
static inline void kp_put_answer(
    const uint8_t *frame, const kp_request *request, const kp_topic *topics, uint8_t *answer, uint32_t size,
    uint32_t *results
) {
    int flexible = request->version >= KP_FLEXIBLE_FROM;
    uint8_t *p = answer;
    kp_put_int32(p, (int32_t)(size - 4));
    kp_put_int32(p + 4, request->correlation_id);
    p += 8;
    if (flexible) *p++ = 0;
    p = kp_put_count(p, request->topic_count, flexible);
    for (uint32_t place = 0; place < request->topic_count; place++) {
        const kp_topic *topic = topics + place;
        memcpy(p, frame + topic->head_start, kp_head_bytes(topic));
        p = kp_put_count(p + kp_head_bytes(topic), topic->count, flexible);
        for (uint32_t ordinal = 0; ordinal < topic->count; ordinal++) {
            results[topic->first + ordinal] = (uint32_t)(p - answer);
            p += kp_result_bytes(request->version);
        }
        if (flexible) *p++ = 0;
    }
    kp_put_int32(p, 0);
    if (flexible) p[4] = 0;
}

/* The size of the request with only the chosen entries. */
static inline uint32_t kp_part_bytes(
    const kp_request *request, const kp_topic *topics, const kp_entry *entries, const uint32_t *chosen, uint32_t count
) {
    int flexible = request->version >= KP_FLEXIBLE_FROM;
    uint32_t bytes = request->topics_start + kp_count_bytes(kp_topics_of(entries, chosen, count), flexible);
    for (uint32_t at = 0; at < count;) {
        const kp_topic *topic = topics + entries[chosen[at]].topic;
        uint32_t ordinals = kp_of_one_topic(entries, chosen, at, count);
        bytes += kp_head_bytes(topic) + kp_count_bytes(ordinals, flexible) + (topic->tail_end - topic->tail_start);
        for (uint32_t end = at + ordinals; at < end; at++) bytes += entries[chosen[at]].end - entries[chosen[at]].start;
    }
    return bytes + (request->size - request->topics_end);
}

/* Encode the request with only the chosen entries into `part`, which has `bytes` = kp_part_bytes. */
static inline void kp_part(
    const uint8_t *frame, const kp_request *request, const kp_topic *topics, const kp_entry *entries,
    const uint32_t *chosen, uint32_t count, int32_t correlation_id, uint8_t *part, uint32_t bytes
) {
    int flexible = request->version >= KP_FLEXIBLE_FROM;
    memcpy(part, frame, request->topics_start);
    kp_put_int32(part, (int32_t)(bytes - 4));
    kp_put_int32(part + KP_CORRELATION_ID_OFFSET, correlation_id);
    uint8_t *p = kp_put_count(part + request->topics_start, kp_topics_of(entries, chosen, count), flexible);
    for (uint32_t at = 0; at < count;) {
        const kp_topic *topic = topics + entries[chosen[at]].topic;
        uint32_t ordinals = kp_of_one_topic(entries, chosen, at, count);
        memcpy(p, frame + topic->head_start, kp_head_bytes(topic));
        p = kp_put_count(p + kp_head_bytes(topic), ordinals, flexible);
        for (uint32_t end = at + ordinals; at < end; at++) {
            const kp_entry *entry = entries + chosen[at];
            memcpy(p, frame + entry->start, entry->end - entry->start);
            p += entry->end - entry->start;
        }
        memcpy(p, frame + topic->tail_start, topic->tail_end - topic->tail_start);
        p += topic->tail_end - topic->tail_start;
    }
    memcpy(p, frame + request->topics_end, request->size - request->topics_end);
}

#endif
