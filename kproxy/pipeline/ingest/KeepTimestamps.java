package kproxy;

import org.apache.kafka.clients.producer.ProducerInterceptor;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.header.Header;

/** Gives a record the timestamp that its header tells, in milliseconds, and removes the header. */
public class KeepTimestamps implements ProducerInterceptor {
    public void configure(java.util.Map settings) {}

    public void close() {}

    public void onAcknowledgement(RecordMetadata metadata, Exception error) {}

    public ProducerRecord onSend(ProducerRecord record) {
        Header told = record.headers().lastHeader("_kproxy_timestamp");
        if (told == null) {
            return record;
        }
        long timestamp = Long.parseLong(new String(told.value()));
        record.headers().remove("_kproxy_timestamp");
        // In Kafka a negative timestamp means none.
        if (timestamp < 0) {
            return record;
        }
        Long kept = Long.valueOf(timestamp);
        return new ProducerRecord(
            record.topic(), record.partition(), kept, record.key(), record.value(), record.headers());
    }
}
