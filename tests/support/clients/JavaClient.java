import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Method;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Iterator;
import java.util.List;
import java.util.Properties;

import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.Callback;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;

/**
 * A producer and a consumer on any kafka-clients from 0.11 on. Arguments: produce | both, TOPIC, PARTITIONS, and the
 * settings of the client as name=value.
 *
 * Each line of the standard input is a record, "partition key value [header-name header-value]...", sent at once. When
 * the input has ended and all is settled it prints "sent COUNT" and, in the order of completion, "ack NUMBER PARTITION
 * OFFSET" or "error NUMBER WHAT" for each record. With `both` it reads as many records back as there were lines and
 * prints "record PARTITION OFFSET KEY VALUE [HEADER-NAME HEADER-VALUE]..." for each.
 *
 * Bytes are ":" and base64, "-" stands for null. Written for Janino, hence neither lambdas nor inferred types: that
 * compiler is everywhere where Spark is, while a Java runtime often comes without one.
 */
public final class JavaClient {
    private static final long PATIENCE_MS = 60000L;
    private static final String BYTES = "org.apache.kafka.common.serialization.ByteArray";

    private final String topic;
    private final Properties settings;
    private final PrintStream out;

    private JavaClient(String topic, Properties settings, PrintStream out) {
        this.topic = topic;
        this.settings = settings;
        this.out = out;
    }

    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        for (int i = 3; i < arguments.length; i++) {
            int equals = arguments[i].indexOf('=');
            settings.put(arguments[i].substring(0, equals), arguments[i].substring(equals + 1));
        }
        PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), false, "US-ASCII");
        JavaClient client = new JavaClient(arguments[1], settings, out);
        int count = client.produce();
        if (arguments[0].equals("both")) {
            client.consume(Integer.parseInt(arguments[2]), count);
        }
        out.flush();
    }

    private int produce() throws Exception {
        settings.put("key.serializer", BYTES + "Serializer");
        settings.put("value.serializer", BYTES + "Serializer");
        KafkaProducer producer = new KafkaProducer(settings);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, "US-ASCII"));
        final StringBuilder settled = new StringBuilder();
        int count = 0;
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            final int number = count++;
            producer.send(record(line), new Callback() {
                public void onCompletion(RecordMetadata placed, Exception error) {
                    if (error == null) {
                        settled.append("ack " + number + " " + placed.partition() + " " + placed.offset() + "\n");
                    } else {
                        settled.append("error " + number + " " + error + "\n");
                    }
                }
            });
        }
        producer.flush();
        producer.close();
        out.println("sent " + count);
        out.print(settled);
        return count;
    }

    private ProducerRecord record(String line) {
        String[] fields = line.split(" ");
        Integer partition = fields[0].equals("-") ? null : Integer.valueOf(fields[0]);
        ProducerRecord record = new ProducerRecord(topic, partition, null, decode(fields[1]), decode(fields[2]), null);
        for (int i = 3; i < fields.length; i += 2) {
            record.headers().add(fields[i], decode(fields[i + 1]));
        }
        return record;
    }

    private void consume(int partitions, int count) throws Exception {
        settings.put("key.deserializer", BYTES + "Deserializer");
        settings.put("value.deserializer", BYTES + "Deserializer");
        settings.put("enable.auto.commit", "false");
        KafkaConsumer consumer = new KafkaConsumer(settings);
        List all = new ArrayList();
        for (int i = 0; i < partitions; i++) {
            all.add(new TopicPartition(topic, i));
        }
        consumer.assign(all);
        consumer.seekToBeginning(all);
        long deadline = System.currentTimeMillis() + PATIENCE_MS;
        int read = 0;
        while (read < count && System.currentTimeMillis() < deadline) {
            Iterator records = poll(consumer).iterator();
            while (records.hasNext()) {
                print((ConsumerRecord) records.next());
                read++;
            }
        }
        consumer.close();
    }

    /** poll(long) is gone in 4.0, poll(Duration) came with 2.0. */
    private static ConsumerRecords poll(KafkaConsumer consumer) throws Exception {
        try {
            Method poll = KafkaConsumer.class.getMethod("poll", new Class[] {Duration.class});
            return (ConsumerRecords) poll.invoke(consumer, new Object[] {Duration.ofMillis(200L)});
        } catch (NoSuchMethodException before2) {
            Method poll = KafkaConsumer.class.getMethod("poll", new Class[] {Long.TYPE});
            return (ConsumerRecords) poll.invoke(consumer, new Object[] {Long.valueOf(200L)});
        }
    }

    private void print(ConsumerRecord record) {
        StringBuilder line = new StringBuilder("record ");
        line.append(record.partition()).append(' ').append(record.offset());
        line.append(' ').append(encode((byte[]) record.key())).append(' ').append(encode((byte[]) record.value()));
        Header[] headers = record.headers().toArray();
        for (int i = 0; i < headers.length; i++) {
            line.append(' ').append(headers[i].key()).append(' ').append(encode(headers[i].value()));
        }
        out.println(line);
    }

    private static byte[] decode(String field) {
        return field.equals("-") ? null : Base64.getDecoder().decode(field.substring(1));
    }

    private static String encode(byte[] bytes) {
        return bytes == null ? "-" : ":" + Base64.getEncoder().encodeToString(bytes);
    }
}
