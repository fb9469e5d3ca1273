import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Transactions of a producer with default settings: what is sent is named by its fate.
 *
 * Arguments: bootstrap, topic, transactional id, partitions, records in a transaction, fates (one transaction each, of
 * "commit" and "abort"). Prints "done", or "failed after N ms: " and the exception with its causes.
 */
public final class TransactionalClient {
    public static void main(String[] arguments) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", arguments[0]);
        settings.put("transactional.id", arguments[2]);
        settings.put("key.serializer", StringSerializer.class.getName());
        settings.put("value.serializer", StringSerializer.class.getName());
        int partitions = Integer.parseInt(arguments[3]);
        int records = Integer.parseInt(arguments[4]);
        long began = System.nanoTime();
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings)) {
            producer.initTransactions();
            for (int number = 5; number < arguments.length; number++) {
                String fate = arguments[number];
                producer.beginTransaction();
                for (int record = 0; record < records; record++) {
                    String value = fate + " " + (number - 5) + " " + record;
                    producer.send(new ProducerRecord<>(arguments[1], record % partitions, null, value));
                }
                if (fate.equals("commit")) {
                    producer.commitTransaction();
                } else {
                    producer.flush();
                    producer.abortTransaction();
                }
            }
            System.out.println("done");
        } catch (Exception failure) {
            long millis = (System.nanoTime() - began) / 1_000_000;
            StringBuilder text = new StringBuilder("failed after " + millis + " ms:");
            for (Throwable each = failure; each != null; each = each.getCause()) {
                text.append(" ").append(each);
            }
            System.out.println(text);
            System.exit(1);
        }
    }
}
